"""Models of MLX, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.backends.mlx.async_mlx_lm import AsyncMlxLM
    from genlm_backend.compat.replaced import HAS_MLX

__all__ = ["HAS_MLX", "AsyncMlxLM"]

__getattr__, __dir__ = lazy_names(globals())
