"""Threads: what slows the worker down beside it, and calls from one thread to another's loop."""

from __future__ import annotations

import asyncio
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
FREEZE: Final = "GENLM_BACKEND_FREEZE"
"""Name of the variable of the environment that refuses ``freeze_imports``, if it is 0."""

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
    if (pause := _pause_function()) is not None:
        pause(_PAUSE_HARD)


@final
class _SwitchInterval:
    """Python's switch interval, shorter while threads are inside; the last one out restores it."""

    def __init__(self) -> None:
        self._lock, self._num_inside = threading.Lock(), 0
        self._before = self._ours = sys.getswitchinterval()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        with self._lock:
            self._add(1)
        try:
            yield
        finally:
            with self._lock:
                self._add(-1)

    def _add(self, number: int) -> None:
        if not self._num_inside:
            self._before = self._ours = sys.getswitchinterval()
        self._num_inside += number
        # Or somebody else has set it meanwhile, and it stays.
        if sys.getswitchinterval() == self._ours:
            wanted = min(self._before, SWITCH_INTERVAL) if self._num_inside else self._before
            sys.setswitchinterval(wanted)
            self._ours = sys.getswitchinterval()

    def _renew(self) -> None:
        """Restore it in a fork, which has none of the threads that were inside."""
        self._lock = threading.Lock()
        self._add(-self._num_inside)


_interval = _SwitchInterval()


def frequent_switches() -> contextlib.AbstractContextManager[None]:
    """While inside, a thread that computes in Python gives way every few microseconds."""
    # Each of a pass's thousand operators gives up the interpreter lock, which a thread that
    # computes in Python keeps for 5 ms by default: a pass of 0.1 s takes 8 s. With this interval
    # it takes about 1 s, and the other threads lose some 15 %.
    return _interval.shortened()


def freeze_imports() -> None:
    """Have the garbage collector leave alone what has been imported, unless that is refused."""
    # A thousand tasks are enough for Python to look through all objects, of which torch and
    # transformers bring 400,000: a fifth of a second every few steps. A model comes afterwards:
    # objects of it that are in cycles, as accelerate's hooks make them, could not be freed. An
    # earlier model, which a program has wrapped and not closed, still has its worker thread.
    has_model = any(thread.name.startswith("genlm-") for thread in threading.enumerate())
    is_refused = bool(gc.get_freeze_count()) or os.environ.get(FREEZE) == "0"
    if gc.isenabled() and not has_model and not is_refused:
        gc.collect()
        gc.freeze()


def call_threadsafe(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any
) -> None:
    """Have ``loop`` call back soon, unless it has been closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # A closed loop has nobody left to tell.
