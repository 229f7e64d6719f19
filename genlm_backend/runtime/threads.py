"""Settings of threads, the GIL and garbage collection for model passes; calls into event loops."""

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

_PAUSE_HARD: Final = 2  # omp_pause_hard; see omp_pause_resource, OpenMP 5.0
SWITCH_INTERVAL: Final = 2e-5
FREEZE: Final = "GENLM_BACKEND_FREEZE"
"""Environment variable that disables ``freeze_imports`` if it is 0."""

_numbers = ProcessLock()
"""Held while ``use_num_threads`` briefly changes torch's default for new threads."""


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of the libgomp in torch's wheel, ``None`` if not found."""
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
    """Set torch's number of threads for the calling thread only; return the previous number."""
    # ``torch.set_num_threads`` also sets the default of threads that have not run an operator yet,
    # so another, fresh thread reads that default before the call and restores it afterwards.
    import torch

    with _numbers.here, ThreadPoolExecutor(1) as other:
        before = torch.get_num_threads()  # first: it initialises this thread from the default
        theirs = other.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        other.submit(torch.set_num_threads, theirs).result()
    return before


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """In this context, the calling thread's operators use one thread; other threads keep theirs."""
    # If other processes occupy the cores, each parallel operator waits until its last thread is
    # scheduled, and passes of a small model take several times as long as on one thread.
    before = use_num_threads(1)
    try:
        yield
    finally:
        use_num_threads(before)


def release_idle_threads() -> None:
    """End the calling thread's idle OpenMP team; takes about a microsecond if there is none."""
    # OpenMP keeps a team of threads for each thread that has run operators. With idle teams, there
    # are more threads than cores, so libgomp lets threads sleep between operators instead of
    # spinning. A pass of many small operators then takes 1.4 times as long.
    if (pause := _pause_function()) is not None:
        pause(_PAUSE_HARD)


@final
class _SwitchInterval:
    """Shortens Python's switch interval while a thread is in ``shortened()``; then restores it."""

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
        # If other code has changed the interval since the last call here, keep the changed value.
        if sys.getswitchinterval() == self._ours:
            wanted = min(self._before, SWITCH_INTERVAL) if self._num_inside else self._before
            sys.setswitchinterval(wanted)
            self._ours = sys.getswitchinterval()

    def _renew(self) -> None:
        """Restore the interval in a fork, which lacks the threads that were in ``shortened()``."""
        self._lock = threading.Lock()
        self._add(-self._num_inside)


_interval = _SwitchInterval()


def frequent_switches() -> contextlib.AbstractContextManager[None]:
    """Return a context in which threads that wait for the GIL ask for it after 20 microseconds."""
    # A pass has a thousand operators, and each releases the GIL. By default, another thread that
    # computes in Python then keeps the GIL for 5 ms, so that a pass of 0.1 s takes 8 s. With an
    # interval of 20 us, the pass takes about 1 s, and the other threads lose some 15 %.
    return _interval.shortened()


def freeze_imports() -> None:
    """Exempt present objects from garbage collection, unless ``FREEZE`` is 0 or a model is open."""
    # A thousand tasks trigger a full collection, which scans the 400,000 objects of torch and
    # transformers: 0.2 s every few steps. This runs before a model is loaded, since a frozen model
    # in reference cycles, as with accelerate's hooks, could never be freed. Freeze nothing if a
    # worker thread shows that an earlier model is still open, or if objects are frozen already.
    has_model = any(thread.name.startswith("genlm-") for thread in threading.enumerate())
    is_refused = bool(gc.get_freeze_count()) or os.environ.get(FREEZE) == "0"
    if gc.isenabled() and not has_model and not is_refused:
        gc.collect()
        gc.freeze()


def call_threadsafe(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any
) -> None:
    """Call ``loop.call_soon_threadsafe``; do nothing if the loop is closed: no task waits there."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
