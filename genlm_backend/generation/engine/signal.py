"""Signal: threads and coroutines wait for one change alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, final

T = TypeVar("T")


@final
class Signal:
    """Wakes everybody who waits for a change of something that a lock guards.

    Both methods are called under that lock; ``wait_for`` and ``await_for`` wait without it.
    """

    def __init__(self) -> None:
        self._waiters: list[Future[None]] = []

    def waiter(self) -> Future[None]:
        """Return a future that the next change completes."""
        self._waiters = [waiter for waiter in self._waiters if not waiter.done()]
        self._waiters.append(Future())
        return self._waiters[-1]

    def notify(self) -> None:
        """Wake whoever waits."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)


def wait_for(attempt: Callable[[], T | Future[None]], timeout: float | None) -> T | None:
    """Return the result of a function that is no waiter, blocking for each waiter before."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while isinstance(found := attempt(), Future):
        try:
            found.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if found.cancel():  # so that whoever notifies can forget it
                return None
    return found


async def await_for(attempt: Callable[[], T | Future[None]]) -> T:
    """Do as ``wait_for``, leaving the event loop free meanwhile."""
    while isinstance(found := attempt(), Future):
        await asyncio.wrap_future(found)
    return found
