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
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, final

import torch

from genlm_backend.runtime.forks import in_forks

_PAUSE_HARD: Final = 2  # omp_pause_hard, OpenMP 5.0, section 2.15.1
SWITCH_INTERVAL: Final = 2e-5

_numbers = threading.Lock()
"""Held while torch's number for new threads is not their own, so that nobody here takes it."""


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


def use_num_threads(count: int) -> int:
    """Let the calling thread's operators use ``count`` threads; return how many they used before.

    ``torch.set_num_threads`` sets a number for the calling thread, and another one for threads
    that have not used an operator yet, which is put back.
    """
    with _numbers, ThreadPoolExecutor(1) as other:
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
class _SwitchInterval:
    """Shortens the process's switch interval while anybody is inside; nests across threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before = self._ours = 0.0

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_INTERVAL))
                self._ours = sys.getswitchinterval()
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                # Whoever has set it meanwhile knows better.
                if self._num_inside == 0 and sys.getswitchinterval() == self._ours:
                    sys.setswitchinterval(self._before)

    def restore(self) -> None:
        """Put the interval back, whoever is inside."""
        if self._num_inside and sys.getswitchinterval() == self._ours:
            sys.setswitchinterval(self._before)


_interval = _SwitchInterval()


@in_forks
def _renew() -> None:
    """Forget what threads of the parent process held, who are not in this one."""
    global _interval, _numbers
    _interval.restore()
    _interval, _numbers = _SwitchInterval(), threading.Lock()


def frequent_switches() -> contextlib.AbstractContextManager[None]:
    """While inside, a thread that computes in Python gives way every few microseconds."""
    return _interval.shortened()
