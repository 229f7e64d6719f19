"""SpareMemory: a pool that reuses the memory of result arrays once they are unreferenced."""

from __future__ import annotations

import math
import threading
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]


@final
class SpareMemory:
    """Makes arrays from the memory of freed arrays; any thread may drop an array at any time."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        # Fresh memory costs more time than computing what it stores: the OS clears each page on
        # first touch, and the allocator returns large blocks to the OS as soon as they are freed.
        self._unused: dict[tuple[Shape, np.dtype], list[NDArray[Any]]] = {}
        self._lock = threading.Lock()

    def take_array(self, shape: Shape, dtype: type[np.generic]) -> NDArray[Any]:
        """Return an uninitialised array; its memory returns to the pool when the array is freed."""
        key = (shape, np.dtype(dtype))
        memory = None
        # Never wait: in a fork, the lock may be held by a thread that does not exist there.
        if self._lock.acquire(blocking=False):
            try:
                if key in self._unused:
                    memory = self._pop(key)
            finally:
                self._lock.release()
        if memory is None:
            memory = np.empty(shape, dtype)
        # An empty array has no memory to reuse, and NumPy would not keep the lease alive.
        return np.asarray(_Lease(memory, self)) if math.prod(shape) else memory

    def give(self, memory: NDArray[Any]) -> None:
        """Keep ``memory`` for later arrays; drop it if it is too large or the lock is taken."""
        # Never wait: the garbage collector may call this from within ``take_array``.
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
        if self._lock.acquire(timeout=1.0):  # in a fork, the lock may stay locked forever
            try:
                self._drop_until(0)
            finally:
                self._lock.release()

    def __reduce__(self) -> tuple[type[SpareMemory], tuple[int]]:
        return type(self), (self._max_bytes,)  # a copy starts empty

    def _drop_until(self, max_bytes: int) -> None:
        while self.num_bytes > max_bytes:
            self._pop(next(iter(self._unused)))

    def _pop(self, key: tuple[Shape, np.dtype]) -> NDArray[Any]:
        memory = self._unused[key].pop()
        self.num_bytes -= memory.nbytes
        if not self._unused[key]:
            del self._unused[key]  # or the keys of all past shapes would stay
        return memory


@final
class _Lease:
    """The base object of an array; it gives back the array's memory when the array is dropped."""

    __slots__ = ("__weakref__", "_memory", "_spare")

    def __init__(self, memory: NDArray[Any], spare: SpareMemory) -> None:
        self._memory = memory
        self._spare = spare

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._spare.give(self._memory)
