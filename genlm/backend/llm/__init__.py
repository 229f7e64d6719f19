"""Language models under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.llm.absent import AsyncSGLTransformer
    from genlm_backend.llm.base import AsyncLM
    from genlm_backend.llm.hf.model import AsyncTransformer
    from genlm_backend.llm.mlx.model import AsyncMlxLM
    from genlm_backend.llm.mock import MockAsyncLM
    from genlm_backend.llm.registry import load_model_by_name
    from genlm_backend.llm.vllm.model import AsyncVirtualLM

__all__ = [
    "AsyncLM",
    "AsyncMlxLM",
    "AsyncSGLTransformer",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "MockAsyncLM",
    "load_model_by_name",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "AsyncLM": "genlm_backend.llm.base",
        "AsyncMlxLM": "genlm_backend.llm.mlx.model",
        "AsyncSGLTransformer": "genlm_backend.llm.absent",
        "AsyncTransformer": "genlm_backend.llm.hf.model",
        "AsyncVirtualLM": "genlm_backend.llm.vllm.model",
        "MockAsyncLM": "genlm_backend.llm.mock",
        "load_model_by_name": "genlm_backend.llm.registry",
    },
    submodules=("base", "hf", "mlx", "sgl", "vllm"),
)
