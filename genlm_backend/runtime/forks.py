"""Forks of a process: what is renewed in one, what raises there, and what does nothing.

A fork has a copy of every object and none of the threads: a lock that one of them held stays
locked, and what was queued for one of them stays in the queue.
"""

from __future__ import annotations

import abc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar, final

from genlm_backend.errors import ForkedError, NotPicklableError

F = TypeVar("F", bound=Callable[[], None])

_MAKE_IT_THERE: Final = (
    "make the model, engine or trie in the process that uses it, after the fork or in one that "
    "spawn has started (for a DataLoader of torch, in its worker_init_fn)"
)

_renewals: Final[list[Callable[[], None]]] = []


def in_forks(renew: F) -> F:
    """Have a function called in every fork of this process, before anything else is there."""
    _renewals.append(renew)
    return renew


def _renew() -> None:
    for renew in _renewals:
        renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def finalize_here(owner: object, function: Callable[..., object], *args: Any) -> weakref.finalize:
    """Return a ``weakref.finalize`` that does nothing in a fork of this process."""
    return weakref.finalize(owner, _finalize, os.getpid(), function, *args)


def _finalize(process: int, function: Callable[..., object], *args: Any) -> None:
    if os.getpid() == process:
        function(*args)


class OfOneProcess(abc.ABC):  # noqa: B024
    """An object with threads, which live in the process that made it: it is not pickled."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise NotPicklableError(
            f"{type(self).__name__} cannot be pickled or copied, since its threads live in one "
            f"process: {_MAKE_IT_THERE}"
        )


@final
class ProcessLock:
    """A lock of the process that claims it; taken in a fork of that process it raises instead.

    So what is guarded by such a lock says at once that it cannot be used there. What no process has
    claimed works in a fork. It is taken by ``with lock.here:``.
    """

    __slots__ = ("__weakref__", "_make", "_owner", "here", "native")

    def __init__(self, is_reentrant: bool = False) -> None:
        self._make = threading.RLock if is_reentrant else threading.Lock
        self.native: threading.Lock | threading.RLock = self._make()
        self.here: threading.Lock | threading.RLock | _Foreign = self.native
        self._owner: int | None = None
        _locks.add(self)

    def claim(self) -> None:
        """Make this process the owner if there is none yet."""
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
    """A stand-in, in a fork, for a lock of the process that it was forked from."""

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def error(self) -> ForkedError:
        process = os.getpid()
        return ForkedError(
            f"used in process {process}, which was forked from process {self._owner} where it "
            f"lives: its threads are not here; {_MAKE_IT_THERE}"
        )

    def __enter__(self) -> bool:
        raise self.error()

    def __exit__(self, *exception: object) -> None:
        """Do nothing: it has not been entered."""


_locks: Final[weakref.WeakSet[ProcessLock]] = weakref.WeakSet()
"""Every lock of this process, for a fork of it to go through."""


@in_forks
def _renew_locks() -> None:
    for lock in list(_locks):
        lock.renew()
