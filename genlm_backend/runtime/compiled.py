"""Loops that are compiled once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` when it is first called with new types, without the interpreter lock."""
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # no place to write a cache to
        return numba.njit(function, nogil=True)
