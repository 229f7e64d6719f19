"""Guards against use after a fork, which copies all objects but only the calling thread."""

from __future__ import annotations

import abc
import os
import threading
from typing import Final, NoReturn, final

from genlm_backend.errors import ForkedError, NotPicklableError

_MAKE_IT_THERE: Final = (
    "make the model, engine or trie in the process that uses it, after the fork or in a spawned "
    "process (for a torch DataLoader, in its worker_init_fn)"
)

_process = os.getpid()


def _note_process() -> None:
    global _process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_process)


class OfOneProcess(abc.ABC):  # noqa: B024
    """An object whose threads live in the process that made it; pickling or copying it raises."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotPicklableError(
            f"{type(self).__name__} cannot be pickled or copied, since its threads live in one "
            f"process: {_MAKE_IT_THERE}"
        )


@final
class ProcessLock:
    """A lock owned by the process that claims it; in forks of that process, ``here`` raises."""

    __slots__ = ("_is_claimed", "_lock", "_make", "_owner")

    def __init__(self, is_reentrant: bool = False) -> None:
        self._make = threading.RLock if is_reentrant else threading.Lock
        self._owner, self._is_claimed, self._lock = _process, False, self._make()

    @property
    def here(self) -> threading.Lock | threading.RLock:
        """The lock itself; raises a ``ForkedError`` in a fork of the process that claimed it."""
        # Return no wrapper: an interrupt in its Python ``__enter__`` could leave the lock locked.
        if self._owner != _process:
            if self._is_claimed:
                raise ForkedError(
                    f"used in process {_process}, a fork of process {self._owner} without its "
                    f"threads: {_MAKE_IT_THERE}"
                )
            self._owner, self._lock = _process, self._make()  # the old one may be locked forever
        return self._lock

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the process that claimed the lock."""
        return self._is_claimed and self._owner != _process

    def claim(self) -> None:
        """Make this process the owner if there is none yet; raises like ``here``."""
        if not self._is_claimed or self._owner != _process:
            _ = self.here
            self._is_claimed = True
