"""Statistics of a Batcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Self

from genlm_backend.readable import Readable


@dataclass(frozen=True, slots=True, repr=False)
class BatcherStatistics(Readable):
    """Counts since the batcher was made.

    Attributes:
        num_submitted: Queries handed in.
        num_joined: Number of these that an equal query already waiting answered too.
        num_skipped: Distinct queries never evaluated, because every caller had gone.
        num_failed: Distinct queries answered with an exception.
        num_batches: Calls of ``evaluate``.
        batch_sizes: How many batches had each size.
        num_pending: Distinct queries waiting now.
        num_in_flight: Distinct queries being evaluated now.
    """

    num_submitted: int = 0
    num_joined: int = 0
    num_skipped: int = 0
    num_failed: int = 0
    num_batches: int = 0
    batch_sizes: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    num_pending: int = 0
    num_in_flight: int = 0

    @classmethod
    def sum(cls, several: Iterable[Self]) -> Self:
        """Return the counts of several batchers together."""
        several = list(several)
        sizes: Counter[int] = Counter()
        for statistics in several:
            sizes.update(statistics.batch_sizes)
        names = [field.name for field in fields(cls) if field.name != "batch_sizes"]
        numbers = {name: sum(getattr(one, name) for one in several) for name in names}
        return cls(**numbers, batch_sizes=MappingProxyType(dict(sorted(sizes.items()))))
