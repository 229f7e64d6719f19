"""Signal: threads and coroutines wait for one change alike."""

from __future__ import annotations

from concurrent.futures import Future
from typing import final


@final
class Signal:
    """Wakes everybody who waits for a change of something that a lock guards.

    Both methods are called under that lock. A thread then waits for ``future.result(timeout)``
    without it, a coroutine for ``asyncio.wrap_future(future)``.
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
