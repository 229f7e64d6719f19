"""Ticker: what one event loop has seen of the queue, pass after pass."""

from __future__ import annotations

import asyncio
import time
from typing import final

from genlm_backend.batching.policy import BatchState

LOST_SECONDS = 1.0
"""Seconds without a pass after which a loop is asked for another one."""


@final
class Ticker:
    """The passes of one event loop since queries began to wait.

    Attributes:
        is_scheduled: Whether the loop has been asked for another pass for the queue.
    """

    __slots__ = ("_last", "_num_passes", "_num_quiet_passes", "_seen", "_since", "is_scheduled")

    def __init__(self) -> None:
        self.is_scheduled = False
        self.start(-1)

    def start(self, num_arrived: int) -> None:
        """Begin to count, with so many queries there have ever been."""
        self._num_passes = self._num_quiet_passes = 0
        self._seen, self._since = num_arrived, time.monotonic()
        self._last = self._since

    @property
    def is_coming(self) -> bool:
        """Whether the loop will make another pass, as far as one can tell.

        An interrupt may have come between the note and the pass. One too many does no harm.
        """
        return self.is_scheduled and time.monotonic() - self._last <= LOST_SECONDS

    def tick(
        self, num_arrived: int, num_pending: int, is_busy: bool, is_urgent: bool
    ) -> BatchState:
        """Count a pass; return the state of the queue with what this loop has seen of it."""
        self._num_passes += 1
        self._num_quiet_passes = self._num_quiet_passes + 1 if self._seen == num_arrived else 0
        self._seen = num_arrived
        self._last = time.monotonic()
        waited = self._last - self._since
        return BatchState(
            num_pending, is_busy, is_urgent, self._num_passes, self._num_quiet_passes, waited
        )


@final
class Tickers(dict[asyncio.AbstractEventLoop, Ticker]):
    """The tickers of event loops, but of those that have been closed."""

    def of(self, loop: asyncio.AbstractEventLoop) -> Ticker:
        """Return the ticker of a loop, which is made where it is not there."""
        if loop not in self:
            for closed in [other for other in self if other.is_closed()]:
                del self[closed]
            self[loop] = Ticker()
        return self[loop]
