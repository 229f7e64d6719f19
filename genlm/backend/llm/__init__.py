"""Language models under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.backends.hf.async_transformer import AsyncTransformer
    from genlm_backend.backends.mlx.async_mlx_lm import AsyncMlxLM
    from genlm_backend.backends.mock import MockAsyncLM
    from genlm_backend.backends.registry import load_model_by_name
    from genlm_backend.backends.vllm.async_virtual_lm import AsyncVirtualLM
    from genlm_backend.compat.draw import temper
    from genlm_backend.compat.replaced import AsyncSGLTransformer
    from genlm_backend.model.async_lm import AsyncLM

__all__ = [
    "AsyncLM",
    "AsyncMlxLM",
    "AsyncSGLTransformer",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "MockAsyncLM",
    "load_model_by_name",
    "temper",
]

__getattr__, __dir__ = lazy_names(globals(), submodules=("base", "hf", "mlx", "sgl", "vllm"))
