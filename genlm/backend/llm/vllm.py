"""Models of vLLM, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.backends.vllm.async_virtual_lm import AsyncVirtualLM
    from genlm_backend.compat.replaced import HAS_VLLM, BackendScheduler

__all__ = ["HAS_VLLM", "AsyncVirtualLM", "BackendScheduler"]

__getattr__, __dir__ = lazy_names(globals())
