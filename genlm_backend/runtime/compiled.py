"""Loops that are compiled once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` when it is first called with new types, without the interpreter lock.

    Numba keeps the machine code beside the source, or in the user's cache directory, so that
    the next process loads it in milliseconds. Where neither can be written, it is compiled anew
    in each process.
    """
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # no place to write a cache to
        return numba.njit(function, nogil=True)
