"""Have Python's garbage collector wait while many objects are made.

A batch of a thousand queries is some ten thousand small objects that are alive at once and gone
when it is answered. Python collects garbage whenever several hundred have been made, and what is
alive then counts as old from there on, so that every few batches it looks through all old objects
of the process: a fifth of a second each time where torch and transformers are loaded. Collected
afterwards, the objects of a batch are gone already.

What other threads leave meanwhile is collected every half second, between two passes of the
model, as far as it is young, and all of it twice a minute. Who turns collection off while such a
batch is evaluated finds it on again afterwards, since Python does not tell who has turned it off.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Final, final

MANY_QUERIES: Final = 32
"""Queries of a batch from which on its objects are worth it."""

MOST_SECONDS: Final = 0.5
"""Seconds after which young garbage is collected all the same, about."""

MOST_SECONDS_OF_OLD: Final = 30.0
"""The same for old garbage, where batches of several models are never all done."""

_YOUNG: Final = 1


@final
class _Collection:
    """Turns the process's garbage collection off while anybody is inside; nests across threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._is_ours = False  # and not of somebody who had turned it off before
        self._since = self._since_old = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._is_ours = gc.isenabled()
                self._since = self._since_old = time.monotonic()
                gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    self.restore()

    def collect_if_due(self) -> None:
        """Collect garbage if none has been for long, and it is ours to decide."""
        now = time.monotonic()
        if not self._is_ours or now - self._since <= MOST_SECONDS:
            return
        self._since = now
        if now - self._since_old > MOST_SECONDS_OF_OLD:
            self._since_old = now
            gc.collect()
        else:
            gc.collect(_YOUNG)

    def restore(self) -> None:
        """Turn it on again if it was."""
        if self._is_ours:
            gc.enable()
            self._is_ours = False  # afterwards, since a fork may be made between the two


_collection = _Collection()


def _renew_after_fork() -> None:
    """Forget who was inside in the parent process, whose threads are not in this one."""
    global _collection
    _collection.restore()
    _collection = _Collection()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


def collection_paused(num_queries: int | None = None) -> contextlib.AbstractContextManager[None]:
    """While inside, no garbage is collected, but what nothing refers to goes as ever.

    Args:
        num_queries: Number of queries of a batch; of few, nothing is changed. ``None`` for other
            work.
    """
    is_worth_it = num_queries is None or num_queries >= MANY_QUERIES
    return _collection.paused() if is_worth_it else contextlib.nullcontext()


def collect_if_due() -> None:
    """Between two steps of long work: collect young garbage if that has been paused for long."""
    _collection.collect_if_due()
