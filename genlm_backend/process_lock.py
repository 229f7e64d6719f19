"""ProcessLock: a lock that nobody waits for in a fork of its process."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from genlm_backend.errors import ForkedError


class ProcessLock:
    """A lock of the process that first asks for it; in a fork of that process it raises instead.

    A fork has a copy of every object and none of the threads: a lock that one of them held stays
    locked, and what was queued for one of them stays in the queue. So what is guarded by such a
    lock says at once that it cannot be used there.

    Args:
        is_reentrant: Whether the thread that holds it may take it again.
    """

    def __init__(self, is_reentrant: bool = False) -> None:
        self._lock = threading.RLock() if is_reentrant else threading.Lock()
        self._owner: int | None = None

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
        """Whether it is owned by a process that this one has been forked from."""
        return self._owner not in (None, os.getpid())

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, as ``threading.Lock.acquire``.

        Raises:
            ForkedError: As ``claim``.
        """
        self.claim()
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> None:
        self.claim()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
