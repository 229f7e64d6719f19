"""Compiles loops with Numba, and caches the machine code on disk if a cache folder is writable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Numba version of ``function``, which compiles on first use and releases the GIL."""
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # no writable folder for the cache
        return numba.njit(function, nogil=True)
