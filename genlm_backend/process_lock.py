"""ProcessLock: a lock that raises in a fork of its process, where it might never be free."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final, final

from genlm_backend.errors import ForkedError


@final
class ProcessLock:
    """A lock of the process that claims it; taken in a fork of that process it raises instead.

    A fork has a copy of every object and none of the threads: a lock that one of them held stays
    locked, and what was queued for one of them stays in the queue. So what is guarded by such a
    lock says at once that it cannot be used there. What no process has claimed works in a fork. It
    is taken by ``with lock.here:``.

    Args:
        is_reentrant: Whether the thread that holds it may take it again.

    Attributes:
        native: The lock itself, whatever the process. A ``with`` statement takes it without a step
            of Python in between, in which an interrupt could leave it locked.
        here: The same lock, or what raises a ``ForkedError`` when it is taken.
    """

    __slots__ = ("__weakref__", "_make", "_owner", "here", "native")

    def __init__(self, is_reentrant: bool = False) -> None:
        self._make = threading.RLock if is_reentrant else threading.Lock
        self.native: threading.Lock | threading.RLock = self._make()
        self.here: threading.Lock | threading.RLock | _Foreign = self.native
        self._owner: int | None = None
        _locks.add(self)

    def claim(self) -> None:
        """Make this process the owner if there is none yet.

        Raises:
            ForkedError: (``RuntimeError``) If another process is the owner, which this one has
                been forked from.
        """
        if self._owner is None:
            self._owner = os.getpid()
        elif isinstance(self.here, _Foreign):
            raise self.here.error()

    @property
    def is_foreign(self) -> bool:
        """Whether it is owned by a process that this one has been forked from."""
        return isinstance(self.here, _Foreign)

    def renew(self) -> None:
        """Tell the lock that it is in a fork now, where no thread is that may have held it."""
        if self._owner is None:
            self.native = self.here = self._make()
        else:
            self.here = _Foreign(self._owner)


@final
class _Foreign:
    """What stands in a fork for a lock of the process that it was forked from."""

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def error(self) -> ForkedError:
        process = os.getpid()
        return ForkedError(
            f"used in process {process}, which was forked from process {self._owner} where it "
            f"lives: its threads are not here; make the model, engine or trie in this process, "
            f'or start processes by multiprocessing.get_context("spawn")'
        )

    def __enter__(self) -> bool:
        raise self.error()

    def __exit__(self, *exception: object) -> None:
        """Do nothing: it has not been entered."""


_locks: Final[weakref.WeakSet[ProcessLock]] = weakref.WeakSet()
"""Every lock of this process, for a fork of it to go through."""


def _renew_after_fork() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
