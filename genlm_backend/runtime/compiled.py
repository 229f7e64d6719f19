"""Loops compiled by Numba, whose machine code is cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` on its first call with new argument types; it runs without the GIL."""
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # no writable folder for the cache
        return numba.njit(function, nogil=True)
