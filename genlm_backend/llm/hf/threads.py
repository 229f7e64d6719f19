"""Keep idle OpenMP threads of the caller from slowing down the worker's forward passes.

torch's CPU operators run on OpenMP, which keeps one team of threads for *each* thread that has
used them. When a caller's thread (it loaded the model, or took ``row.exp()`` of a wide row) and
the worker have a team each, libgomp counts more threads than cores and makes all of them sleep
between operators instead of spinning, and a forward pass of many small operators takes about
1.4 times as long. So a caller's idle team is released before it waits for a row; OpenMP makes
it again when the caller next needs one.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

_PAUSE_HARD: Final = 2  # omp_pause_hard, OpenMP 5.0, section 2.15.1


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the libgomp that torch brings, or ``None``.

    Only libgomp: there the call concerns the calling thread's team and nothing else, while
    LLVM's runtime would stop everybody's.
    """
    if sys.platform != "linux":
        return None
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for path in sorted(folder.glob("libgomp*.so*")):
            function = getattr(ctypes.CDLL(str(path)), "omp_pause_resource_all", None)
            if function is not None:
                function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
                return function
    return None


def release_idle_threads() -> None:
    """End the calling thread's idle OpenMP team, if it has one; about a microsecond if not."""
    pause = _pause_function()
    if pause is not None:
        pause(_PAUSE_HARD)
