"""Models of vLLM, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.llm.vllm.model import AsyncVirtualLM
    from genlm_backend.replaced import HAS_VLLM, BackendScheduler

__all__ = ["HAS_VLLM", "AsyncVirtualLM", "BackendScheduler"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "AsyncVirtualLM": "genlm_backend.llm.vllm.model",
        "BackendScheduler": "genlm_backend.replaced",
        "HAS_VLLM": "genlm_backend.replaced",
    },
)
