"""Memory of the host and its devices: free bytes, out-of-memory errors, allocator caches."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

import psutil
import torch

CPU_FRACTION: Final = 0.25
CPU_LIMIT: Final = 4 << 30


def cpu_budget() -> int:
    """Return the default size of a host cache in bytes: a quarter of free memory, up to 4 GiB."""
    return min(CPU_LIMIT, int(free_memory() * CPU_FRACTION))


def free_memory() -> int:
    """Return the available bytes of host memory, including reclaimable caches."""
    return psutil.virtual_memory().available


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def release_cached_memory() -> None:
    """Release unused memory that allocators keep: torch's on the GPU; on Linux, also glibc's."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)  # glibc keeps freed blocks of up to 32 MiB each, in all up to a gigabyte
