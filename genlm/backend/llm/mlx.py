"""Models of MLX, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.llm.mlx.model import AsyncMlxLM
    from genlm_backend.replaced import HAS_MLX

__all__ = ["HAS_MLX", "AsyncMlxLM"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {"AsyncMlxLM": "genlm_backend.llm.mlx.model", "HAS_MLX": "genlm_backend.replaced"},
)
