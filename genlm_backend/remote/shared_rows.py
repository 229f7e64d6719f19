"""SharedRows: memory that two processes see, for rows that are not pickled."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
from typing import Any, Final, Self, final

import numpy as np

_BYTES_PER_NUMBER: Final = 4
MAX_BYTES: Final = 64 << 20
"""Bytes of rows that are handed over at once, at most, unless a single one has more."""


@final
class SharedRows:
    """A table of float32 that two processes have mapped.

    It has no name: nothing of it is left once both have ended, however they did.

    Args:
        descriptor: Number of the open file behind it, which it owns.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def new(cls) -> Self:
        """Return an empty one of this process, for another one to inherit its descriptor."""
        if sys.platform == "linux":
            return cls(os.memfd_create("genlm-rows"))
        with tempfile.TemporaryFile() as file:  # which has lost its name already
            return cls(os.dup(file.fileno()))

    @staticmethod
    def max_rows(width: int) -> int:
        """Return how many rows of a width are handed over at once, at most."""
        return max(1, MAX_BYTES // (_BYTES_PER_NUMBER * max(1, width)))

    def table(self, num_rows: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the memory as float32 ``[num_rows, width]``; it grows where it has to."""
        count = num_rows * width
        size = max(mmap.PAGESIZE, count * _BYTES_PER_NUMBER)
        if self._memory is None or len(self._memory) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self._memory = mmap.mmap(self.descriptor, size)
        return np.frombuffer(self._memory, np.float32, count).reshape(num_rows, width)

    def close(self) -> None:
        """Let go of the memory; again has no effect."""
        self._memory = None
        self._finalizer()
