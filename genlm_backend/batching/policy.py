"""BatchPolicy, which decides when to send a batch; QuietDetector; BatcherStatistics."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, final

from genlm_backend.batching.histogram import Histogram
from genlm_backend.checks import checked, integer, number
from genlm_backend.errors import OptionError
from genlm_backend.readable import Readable

LOST_SECONDS = 1.0
"""Seconds after which a scheduled turn that has not run counts as lost."""


class Decision(enum.Enum):
    """The action to take for the waiting queries."""

    FIRE = "fire"
    """Send a batch to the worker now."""
    YIELD = "yield"
    """Let the event loop take another turn, then decide again."""
    SLEEP = "sleep"
    """Do nothing until a query arrives or the current batch ends, then decide again."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """The input of ``BatchPolicy.decide``."""

    num_pending: int  # distinct queries that wait for a batch
    is_busy: bool = False  # the worker is evaluating a batch
    flush_requested: bool = False  # a caller blocks a thread, or asked for a flush
    num_turns: int = 0  # turns of the event loop while queries waited and the worker was idle
    num_quiet_turns: int = 0  # latest turns in a row without a new query
    waited: float = 0.0  # seconds for which queries waited while the worker was idle


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Bounds on the size and the age of a batch.

    A batch is sent when it is full or flushed, when the event loop has had ``quiet_turns`` turns
    in a row without a new query, or ``timeout`` seconds or ``max_turns`` turns after its first
    query. The timeout and ``max_turns`` only matter if queries come in a steady trickle.

    Attributes:
        max_batch_size: Most distinct queries in one batch; at least 1. If a batcher weighs
            its queries, the largest sum of their weights.
        timeout: Seconds that the first query of a batch may wait for others; zero or more.
            Time while the worker is busy does not count: no batch could be sent then.
        quiet_turns: Turns of the event loop without an arrival after which a batch is sent.
            Use several: a result may pass through a task or two (``asyncio.gather``) before
            the caller sends the next query. One idle turn costs about 20 microseconds.
        max_turns: Turns of the event loop after which a batch is sent in any case.

    Raises:
        OptionTypeError: (``TypeError``) If a field has a wrong type.
        OptionError: (``ValueError``) If a field is out of its bounds.
    """

    max_batch_size: int = 20
    timeout: float = 0.02
    quiet_turns: int = 4
    max_turns: int = 1000

    def __post_init__(self) -> None:
        fields = {name: getattr(self, name) for name in _CHECKS}
        for name, value in checked(_CHECKS, fields).items():
            object.__setattr__(self, name, value)
        if self.max_turns < self.quiet_turns:
            raise OptionError(
                f"max_turns must be at least quiet_turns ({self.quiet_turns}), got {self.max_turns}"
            )

    def decide(self, state: BatchState) -> Decision:
        """Return the decision for ``state``, a pure function of it and the bounds."""
        if state.num_pending == 0 or state.is_busy:
            return Decision.SLEEP
        if (
            state.num_pending >= self.max_batch_size
            or state.flush_requested
            or state.num_quiet_turns >= self.quiet_turns
            or state.num_turns >= self.max_turns
            or state.waited >= self.timeout
        ):
            return Decision.FIRE
        return Decision.YIELD


_CHECKS = {
    "max_batch_size": integer(1),
    "timeout": number(0, is_finite=False),
    "quiet_turns": integer(1),
    "max_turns": integer(1),
}


@final
class QuietDetector:
    """Counts the turns of one event loop since queries began to wait."""

    __slots__ = ("_last", "_num_quiet_turns", "_num_turns", "_seen", "_since", "is_scheduled")

    def __init__(self) -> None:
        self.is_scheduled = False
        self.start(-1)

    def start(self, num_arrived: int) -> None:
        """Start counting at zero; ``num_arrived`` queries have arrived so far."""
        self._num_turns = self._num_quiet_turns = 0
        self._seen, self._since = num_arrived, time.monotonic()
        self._last = self._since

    @property
    def is_coming(self) -> bool:
        """Whether a scheduled turn is expected to run."""
        # An interrupt may lose a scheduled turn, so the flag expires after LOST_SECONDS. If the
        # turn runs after all, one turn too many does no harm.
        return self.is_scheduled and time.monotonic() - self._last <= LOST_SECONDS

    def tick(
        self, num_arrived: int, num_pending: int, is_busy: bool, flush_requested: bool
    ) -> BatchState:
        """Count a turn; return the queue's state with this loop's counts."""
        self._num_turns += 1
        self._num_quiet_turns = self._num_quiet_turns + 1 if self._seen == num_arrived else 0
        self._seen = num_arrived
        self._last = time.monotonic()
        waited = self._last - self._since
        return BatchState(
            num_pending, is_busy, flush_requested, self._num_turns, self._num_quiet_turns, waited
        )


@dataclass(frozen=True, slots=True, repr=False)
class BatcherStatistics(Readable):
    """Counts and durations since the batcher was made.

    Attributes:
        num_submitted: Queries submitted.
        num_joined: Submitted queries that joined an equal one that waited or was being evaluated.
        num_skipped: Distinct queries never evaluated, because no caller waited any more.
        num_failed: Distinct queries whose evaluation ended with an exception.
        num_batches: Calls of ``evaluate``.
        batch_sizes: Number of batches by size.
        num_pending: Distinct queries waiting now.
        num_in_flight: Distinct queries being evaluated now.
        queue_time_seconds: How long the oldest query of each batch waited.
        batch_time_seconds: How long each call of ``evaluate`` took.
    """

    num_submitted: int = 0
    num_joined: int = 0
    num_skipped: int = 0
    num_failed: int = 0
    num_batches: int = 0
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    num_pending: int = 0
    num_in_flight: int = 0
    queue_time_seconds: Histogram = field(default_factory=Histogram)
    batch_time_seconds: Histogram = field(default_factory=Histogram)

    @classmethod
    def sum(cls, several: Iterable[Self]) -> Self:
        """Return the sums of the counts and durations of several batchers."""
        several = list(several)
        sums = dict[str, Any]()
        for name in cls.__dataclass_fields__:
            own = [getattr(statistics, name) for statistics in several]
            if name == "batch_sizes":
                sums[name] = dict(sorted(sum(map(Counter, own), Counter[int]()).items()))
            else:
                sums[name] = (Histogram.added if name.endswith("_seconds") else sum)(own)
        return cls(**sums)
