"""ProcessLock: a lock that raises in a fork of its process, where it might never be free."""

from __future__ import annotations

import os
import threading
from typing import final

from genlm_backend.errors import ForkedError


@final
class ProcessLock:
    """A lock that belongs to the process that first asks for it, and raises in a fork of that one.

    A fork has a copy of every object and none of the threads: a lock that one of them held stays
    locked, and what was queued for one of them stays in the queue. So what is guarded by such a
    lock says at once that it cannot be used there. It is taken by ``with lock.here:``.

    Args:
        is_reentrant: Whether the thread that holds it may take it again.

    Attributes:
        native: Lock of ``threading``, which is not told of processes.
    """

    def __init__(self, is_reentrant: bool = False) -> None:
        self.native = threading.RLock() if is_reentrant else threading.Lock()
        self._owner: int | None = None

    @property
    def here(self) -> threading.Lock | threading.RLock:
        """The lock, of which this process is the owner; see ``claim()``.

        A ``with`` statement takes a lock of Python's own and an interrupt comes before or after
        that; one that came within an ``__enter__`` written here would leave it locked.
        """
        self.claim()
        return self.native

    def claim(self) -> None:
        """Make this process the owner if there is none yet.

        Raises:
            ForkedError: (``RuntimeError``) If another process is the owner, which this one has
                been forked from.
        """
        process = os.getpid()
        if self._owner is None:
            self._owner = process
        elif self._owner != process:
            raise ForkedError(
                f"used in process {process}, which was forked from process {self._owner} where it "
                f"lives: its threads are not here; make the model, engine or trie in this process, "
                f'or start processes by multiprocessing.get_context("spawn")'
            )

    @property
    def is_foreign(self) -> bool:
        """Whether the owner is a process that this one has been forked from."""
        return self._owner not in (None, os.getpid())
