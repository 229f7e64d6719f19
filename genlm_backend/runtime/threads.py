"""Keep other threads and garbage from slowing down the worker's forward passes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, final

from genlm_backend.runtime.forks import ProcessLock

_PAUSE_HARD: Final = 2  # omp_pause_hard, OpenMP 5.0, section 2.15.1
SWITCH_INTERVAL: Final = 2e-5

MANY_QUERIES: Final = 32
"""Smallest batch that changes the threshold of garbage collection."""

OBJECTS_PER_QUERY: Final = 32
"""Objects that are alive for each query of a batch, at most, tasks of its callers included."""

_numbers = ProcessLock()
"""Held while torch's number for new threads is not their own, so that nobody here takes it."""


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the libgomp that torch brings, or ``None``."""
    if sys.platform != "linux":
        return None
    import torch

    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for path in sorted(folder.glob("libgomp*.so*")):
            function = getattr(ctypes.CDLL(str(path)), "omp_pause_resource_all", None)
            if function is not None:
                function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
                return function
    return None


def use_num_threads(count: int) -> int:
    """Let the calling thread's operators use ``count`` threads; return the number before."""
    # ``torch.set_num_threads`` also sets another number, for threads that have not used an operator
    # yet, which is put back.
    import torch

    with _numbers.here, ThreadPoolExecutor(1) as other:
        before = torch.get_num_threads()  # asked first: with its first use, a thread takes theirs
        theirs = other.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        other.submit(torch.set_num_threads, theirs).result()
    return before


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """While inside, the calling thread's operators use no other threads; the others keep theirs."""
    # If other processes hold the cores, each operator of a team waits for its last thread to get a
    # turn, and passes of a small model take several times as long as on one thread.
    before = use_num_threads(1)
    try:
        yield
    finally:
        use_num_threads(before)


def release_idle_threads() -> None:
    """End the calling thread's idle OpenMP team, if it has one; about a microsecond if not."""
    # OpenMP keeps a team for each thread that has used operators. If callers have idle ones,
    # libgomp counts more threads than cores and makes all sleep between operators instead of
    # spinning: a pass of many small operators takes 1.4 times as long.
    pause = _pause_function()
    if pause is not None:
        pause(_PAUSE_HARD)


@final
class _Setting:
    """A setting of the process that threads change while inside; the last one out restores it."""

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        changed: Callable[[Any, int], Any],
    ) -> None:
        self._read, self._write, self._changed = read, write, changed
        self._lock, self._amount = threading.Lock(), 0
        self._before = self._ours = read()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    @contextlib.contextmanager
    def changed(self, amount: int = 1) -> Iterator[None]:
        with self._lock:
            self._add(amount)
        try:
            yield
        finally:
            with self._lock:
                self._add(-amount)

    def _add(self, amount: int) -> None:
        if not self._amount:
            self._before = self._ours = self._read()
        self._amount += amount
        # Or somebody else has set it meanwhile, and it stays.
        if self._read() == self._ours:
            value = self._changed(self._before, self._amount) if self._amount else self._before
            self._write(value)
            self._ours = self._read()

    def _renew(self) -> None:
        """Restore it in a fork, which has none of the threads that were inside."""
        self._lock = threading.Lock()
        self._add(-self._amount)


_interval = _Setting(
    sys.getswitchinterval, sys.setswitchinterval, lambda before, _: min(before, SWITCH_INTERVAL)
)
_threshold = _Setting(
    gc.get_threshold,
    lambda values: gc.set_threshold(*values),
    # Zero means never.
    lambda before, more: (before[0] + more, *before[1:]) if before[0] else before,
)


def frequent_switches() -> contextlib.AbstractContextManager[None]:
    """While inside, a thread that computes in Python gives way every few microseconds."""
    # Each of a pass's thousand operators gives up the interpreter lock, which a thread that
    # computes in Python keeps for 5 ms by default: a pass of 0.1 s takes 8 s. With this interval
    # it takes about 1 s, and the other threads lose some 15 %.
    return _interval.changed()


def fewer_collections(num_queries: int) -> contextlib.AbstractContextManager[None]:
    """While inside, Python waits for the objects of a batch before it looks for young garbage."""
    # A batch of 1,024 queries makes some 20,000 objects, for which Python would search all old
    # ones: 1/8 s each time with transformers loaded. This saves up to 3/4 of the host's work at
    # 1,024 queries a step, and 1/3 at 256, if the forward pass is free.
    if num_queries < MANY_QUERIES:
        return contextlib.nullcontext()
    return _threshold.changed(num_queries * OBJECTS_PER_QUERY)
