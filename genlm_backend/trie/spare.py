"""SpareRows: memory of results that nobody holds any more, for the results to come."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SpareRows:
    """Hands out rows of one length whose memory comes back when the last reference is gone.

    Fresh memory costs more than what is computed into it: the system clears every page when it
    is first touched, and takes large blocks back as soon as they are freed. A program that asks
    step after step for rows of a megabyte, and drops them, would pay that at every step.

    Rows may be dropped on any thread.

    Args:
        length: Elements of a row.
        max_bytes: Bytes of unused rows to keep, at most, of each dtype.
    """

    def __init__(self, length: int, max_bytes: int) -> None:
        self._length = length
        self._max_bytes = max_bytes
        self._unused: dict[np.dtype, deque[NDArray[Any]]] = {}

    def take(self, dtype: np.dtype) -> NDArray[Any]:
        """Return a row of ``dtype`` that nobody else sees; its contents are arbitrary."""
        unused = self._unused.get(dtype)
        if unused is None:
            max_rows = self._max_bytes // (self._length * dtype.itemsize)
            unused = self._unused.setdefault(dtype, deque(maxlen=max_rows))
        try:
            memory = unused.pop()
        except IndexError:
            memory = np.empty(self._length, dtype)
        return np.asarray(_Lease(memory, unused))

    def clear(self) -> None:
        """Give unused memory back to the system."""
        for unused in self._unused.values():
            unused.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of unused rows."""
        return sum(row.nbytes for unused in self._unused.values() for row in list(unused))


class _Lease:
    """What an array handed out is a view of; puts its memory back when the array is gone."""

    __slots__ = ("__weakref__", "_memory", "_unused")

    def __init__(self, memory: NDArray[Any], unused: deque[NDArray[Any]]) -> None:
        self._memory = memory
        self._unused = unused

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._unused.append(self._memory)  # drops the oldest where there are enough
