"""AsyncVirtualLM under an older name of its module."""

from genlm_backend.backends.vllm.async_virtual_lm import AsyncVirtualLM as AsyncVirtualLM
