"""Histogram: counts of durations by length, in the form that Prometheus takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Self, final

BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)  # seconds


@final
@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations, counted by length.

    ``HistogramMetricFamily(name, documentation, buckets=[*histogram.buckets.items()],
    sum_value=histogram.sum)`` of ``prometheus_client`` exports it.

    Attributes:
        buckets: Cumulative counts: each bound in seconds, as text, mapped to the number of
            durations up to it. The last bound is ``"+Inf"``.
        sum: Sum of the durations in seconds.
    """

    buckets: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_NAMES, 0))
    sum: float = 0.0

    @property
    def count(self) -> int:
        """Number of durations."""
        return self.buckets["+Inf"]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the count by name."""
        return {"buckets": dict(self.buckets), "sum": self.sum, "count": self.count}

    def __str__(self) -> str:
        count = self.count
        return f"{count:,}, mean {1000 * self.sum / count:,.1f} ms" if count else "–"

    @classmethod
    def added(cls, several: Iterable[Self]) -> Self:
        """Return one histogram of the durations of all given histograms."""
        several = list(several)
        buckets = {name: sum(own.buckets[name] for own in several) for name in _NAMES}
        return cls(buckets, sum(own.sum for own in several))


@final
class Durations:
    """Counts durations for a ``Histogram``; not thread-safe."""

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count a duration, in the bucket of the lowest bound that it does not exceed."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def histogram(self) -> Histogram:
        """Return the histogram of the durations so far."""
        return Histogram(dict(zip(_NAMES, accumulate(self._counts), strict=True)), self._sum)


_NAMES: Final = (*map(str, BOUNDS), "+Inf")
