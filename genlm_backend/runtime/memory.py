"""Memory of a machine and its devices: what is free, what running out looks like, what is held."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

import psutil
import torch

CPU_FRACTION: Final = 0.25
CPU_LIMIT: Final = 4 << 30


def cpu_budget() -> int:
    """Return the default bytes of one use of a machine's memory."""
    return min(CPU_LIMIT, int(free_memory() * CPU_FRACTION))


def free_memory() -> int:
    """Return the bytes of a machine's memory that are free, or can be made so."""
    return psutil.virtual_memory().available


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def release_cached_memory() -> None:
    """Return memory that allocators hold in reserve: torch's to the device, glibc's to Linux."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)  # it keeps what was freed in pieces of up to 32 MiB: a gigabyte of slots
