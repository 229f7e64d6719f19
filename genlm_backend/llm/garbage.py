"""Have the garbage collector wait while a batch is evaluated.

A batch of a thousand queries is some ten thousand small objects that are alive at once and gone
when it is answered. Python collects garbage whenever several hundred have been made, and what is
alive then counts as old from there on, so that every few batches it looks through all old objects
of the process: a fifth of a second each time where torch and transformers are loaded. Collected
afterwards, the objects of a batch are gone already.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from typing import final


@final
class _Collection:
    """Turns the process's garbage collection off while anybody is inside; nests across threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._is_ours = False  # and not of somebody who had turned it off before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._is_ours = gc.isenabled()
                gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    self.restore()

    def restore(self) -> None:
        """Turn it on again if it was."""
        if self._is_ours:
            self._is_ours = False
            gc.enable()


_collection = _Collection()


def _renew_after_fork() -> None:
    """Forget who was inside in the parent process, whose threads are not in this one."""
    global _collection
    _collection.restore()
    _collection = _Collection()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


def collection_paused() -> contextlib.AbstractContextManager[None]:
    """While inside, no garbage is collected, but what nothing refers to goes as ever."""
    return _collection.paused()
