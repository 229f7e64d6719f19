"""Ticker: what one event loop has seen of the queue, pass after pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from genlm_backend.batching.policy import BatchState


class Ticker:
    """The passes of one event loop since queries began to wait.

    Attributes:
        is_scheduled: Whether the loop will make another pass for the queue.
        num_passes: Passes so far.
        num_quiet_passes: Of these, the latest ones that brought no new query.
    """

    __slots__ = ("_seen", "_since", "is_scheduled", "num_passes", "num_quiet_passes")

    def __init__(self) -> None:
        self.is_scheduled = False
        self.start(-1)

    def start(self, num_arrived: int) -> None:
        """Begin to count, with so many queries there have ever been."""
        self.num_passes = self.num_quiet_passes = 0
        self._seen, self._since = num_arrived, time.monotonic()

    def tick(self, num_arrived: int) -> None:
        """Count a pass."""
        self.num_passes += 1
        self.num_quiet_passes = self.num_quiet_passes + 1 if self._seen == num_arrived else 0
        self._seen = num_arrived

    def schedule(
        self,
        loop: asyncio.AbstractEventLoop,
        tick: Callable[[asyncio.AbstractEventLoop], None],
    ) -> None:
        """Have the loop make another pass for the queue."""
        loop.call_soon(tick, loop)
        self.is_scheduled = True

    def completed(self, state: BatchState) -> BatchState:
        """Return a state of the queue with what this loop has seen of it."""
        return replace(
            state,
            num_passes=self.num_passes,
            num_quiet_passes=self.num_quiet_passes,
            waited=time.monotonic() - self._since,
        )
