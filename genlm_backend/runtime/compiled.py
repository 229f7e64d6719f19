"""Compiles loops with Numba, and caches the machine code on disk if a folder is writable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, compiled for each new set of argument types and run without the GIL."""
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # no writable folder for the cache
        return numba.njit(function, nogil=True)
