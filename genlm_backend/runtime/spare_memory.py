"""SpareMemory: memory of results that are no longer referenced, kept for later results."""

from __future__ import annotations

import math
import threading
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]


@final
class SpareMemory:
    """Makes arrays of the memory of earlier ones, which any thread may drop at any moment."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        # Fresh memory costs more than computing into it: the system clears each page when it is
        # first touched, and takes large blocks back as soon as they are freed.
        self._unused: dict[tuple[Shape, np.dtype], list[NDArray[Any]]] = {}
        self._lock = threading.Lock()

    def take_array(self, shape: Shape, dtype: type[np.generic]) -> NDArray[Any]:
        """Return an array with arbitrary contents."""
        key = (shape, np.dtype(dtype))
        memory = None
        # Waiting could be for ever: in a fork, the lock may be held by a thread that is not there.
        if self._lock.acquire(blocking=False):
            try:
                if key in self._unused:
                    memory = self._pop(key)
            finally:
                self._lock.release()
        if memory is None:
            memory = np.empty(shape, dtype)
        # Without elements there is nothing to put back, and NumPy would not keep the lease.
        return np.asarray(_Lease(memory, self)) if math.prod(shape) else memory

    def give(self, memory: NDArray[Any]) -> None:
        """Keep ``memory`` for later arrays, or free it."""
        # The garbage collector calls this, perhaps from within ``take``: it never waits.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if memory.nbytes <= self._max_bytes:
                self._unused.setdefault((memory.shape, memory.dtype), []).append(memory)
                self.num_bytes += memory.nbytes
                self._drop_until(self._max_bytes)
        finally:
            self._lock.release()

    def clear(self) -> None:
        if self._lock.acquire(timeout=1.0):  # in a fork it may never be free
            try:
                self._drop_until(0)
            finally:
                self._lock.release()

    def __reduce__(self) -> tuple[type[SpareMemory], tuple[int]]:
        return type(self), (self._max_bytes,)  # a copy begins with nothing

    def _drop_until(self, max_bytes: int) -> None:
        while self.num_bytes > max_bytes:
            self._pop(next(iter(self._unused)))

    def _pop(self, key: tuple[Shape, np.dtype]) -> NDArray[Any]:
        memory = self._unused[key].pop()
        self.num_bytes -= memory.nbytes
        if not self._unused[key]:
            del self._unused[key]  # or a key of every batch size ever seen would stay
        return memory


@final
class _Lease:
    """The base of an array, which gives the memory back when the array is gone."""

    __slots__ = ("__weakref__", "_memory", "_spare")

    def __init__(self, memory: NDArray[Any], spare: SpareMemory) -> None:
        self._memory = memory
        self._spare = spare

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._spare.give(self._memory)
