"""Keep other threads from slowing down the worker's forward passes.

**OpenMP.** torch's CPU operators run on OpenMP, which keeps one team of threads for *each*
thread that has used them. When a caller's thread (it loaded the model, or took ``row.exp()`` of a
wide row) and the worker have a team each, libgomp counts more threads than cores and makes all of
them sleep between operators instead of spinning, and a forward pass of many small operators takes
about 1.4 times as long. So a caller's idle team is released before it waits for a row; OpenMP
makes it again when the caller next needs one.

Where other *processes* hold the cores, each operator of a team waits for its last thread to get a
turn. A few passes of a small model take several times as long then as on one thread.

**The interpreter lock.** A forward pass is a thousand small operators, each of which gives the
lock up and takes it back. A thread that computes in Python meanwhile (a grammar, a sampler) keeps
it for ``sys.getswitchinterval()`` each time, five milliseconds by default, and a pass of 0.1
seconds takes eight. So the interval is shortened while a batch is evaluated: that pass takes about
one second then, and the other threads lose some fifteen per cent.

**Garbage.** A batch of a thousand queries is some twenty thousand objects that are gone when it is
answered. Python would count them as old and look through all objects of the process: an eighth of
a second each time if torch and transformers are loaded. So the worker raises the threshold of
young garbage with the batch. With a forward pass that is free, 256 queries a step took a third
less of the host's work, and 1,024 up to three quarters less.
"""

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
"""Queries of a batch from which on its objects are worth it."""

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
    """Let the calling thread's operators use ``count`` threads; return how many they used before.

    ``torch.set_num_threads`` sets a number for the calling thread, and another one for threads
    that have not used an operator yet, which is put back.
    """
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
    before = use_num_threads(1)
    try:
        yield
    finally:
        use_num_threads(before)


def release_idle_threads() -> None:
    """End the calling thread's idle OpenMP team, if it has one; about a microsecond if not."""
    pause = _pause_function()
    if pause is not None:
        pause(_PAUSE_HARD)


@final
class _Setting:
    """A setting of the process that threads change while they are inside.

    The last one to leave puts it back, unless somebody else has set it meanwhile.
    """

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
        if self._read() == self._ours:
            value = self._changed(self._before, self._amount) if self._amount else self._before
            self._write(value)
            self._ours = self._read()

    def _renew(self) -> None:
        """Put it back in a fork, where no thread is that was inside."""
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
    return _interval.changed()


def fewer_collections(num_queries: int) -> contextlib.AbstractContextManager[None]:
    """While inside, Python waits for the objects of a batch before it looks for young garbage."""
    if num_queries < MANY_QUERIES:
        return contextlib.nullcontext()
    return _threshold.changed(num_queries * OBJECTS_PER_QUERY)
