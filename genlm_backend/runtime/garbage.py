"""Have Python look for garbage less often while a worker thread evaluates a large batch.

A batch of a thousand queries is some twenty thousand small objects that are alive at once and gone
when it is answered. Python looks for young garbage whenever 700 have been made, what is alive then
counts as old from there on, and after enough of that it looks through all objects of the process:
an eighth of a second each time where torch and transformers are loaded. Measured with a forward
pass that is free, that is a third more of the host's work with 256 queries a step, and up to three
quarters with 1,024. So the number of objects that Python waits for grows with the batch.

Nothing is turned off, and no caller's thread does this, so that no interrupt comes in between.
Garbage of other threads waits for as many objects more, at most. Who turns collection off or sets
another threshold meanwhile keeps what they have set.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final, final

from genlm_backend.runtime.forks import in_forks

MANY_QUERIES: Final = 32
"""Queries of a batch from which on its objects are worth it."""

OBJECTS_PER_QUERY: Final = 32
"""Objects that are alive for each query of a batch, at most, tasks of its callers included."""


@final
class _Threshold:
    """Raises the process's threshold of young garbage for who is inside; adds up over threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_more = 0
        self._before = self._ours = gc.get_threshold()

    @contextlib.contextmanager
    def raised(self, by: int) -> Iterator[None]:
        with self._lock:
            self._add(by)
        try:
            yield
        finally:
            with self._lock:
                self._add(-by)

    def _add(self, by: int) -> None:
        if self._num_more == 0:
            self._before = self._ours = gc.get_threshold()
        self._num_more += by
        young, *older = self._before
        # Zero means never. And whoever has set another one meanwhile knows better.
        if young and gc.get_threshold() == self._ours:
            self._ours = (young + self._num_more, *older)
            gc.set_threshold(*self._ours)

    def restore(self) -> None:
        """Put the threshold back, whoever is inside."""
        if self._num_more and gc.get_threshold() == self._ours:
            gc.set_threshold(*self._before)


_threshold = _Threshold()


@in_forks
def _renew() -> None:
    """Forget the threads of the parent process, which are not in this one."""
    global _threshold
    _threshold.restore()
    _threshold = _Threshold()


def fewer_collections(num_queries: int) -> contextlib.AbstractContextManager[None]:
    """While inside, Python waits for the objects of a batch before it looks for young garbage."""
    if num_queries < MANY_QUERIES:
        return contextlib.nullcontext()
    return _threshold.raised(num_queries * OBJECTS_PER_QUERY)
