"""ScheduledQuery: one context on its way to a row, or one text on its way to its scores."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.queries.context import Context
from genlm_backend.queries.query import Query
from genlm_backend.queries.row import Row
from genlm_backend.readouts.score_query import NO_EXTRAS, ScoreExtras

PICTURES: Final = attrgetter("context.pictures")


def first_output(query: Query) -> int:
    """Return the first position of a query's context after which logits are wanted."""
    return len(query.context) - (query.num_targets or 1)


@final
@dataclass(slots=True, eq=False)
class ScheduledQuery:
    """One context on its way, and the outputs that are wanted after its tokens."""

    context: Context
    node: int = 0
    start: int = 0
    targets: tuple[int, ...] = ()
    stop: int = field(init=False)
    first: int = field(init=False)
    missing: array[int] = field(init=False)
    position_offset: int = 0
    num_known: int = 0
    row: Row | None = None
    beside: ScoreExtras = NO_EXTRAS
    scores: NDArray[np.float64] = field(init=False)  # [num_targets, beside.width] float64

    def __post_init__(self) -> None:
        self.stop = len(self.context)
        self.first = self.stop - (len(self.targets) or 1)
        self.missing = self.context.packed(self.start)
        self.scores = np.zeros((len(self.targets), self.beside.width))

    @classmethod
    def of(cls, query: Query, node: int = 0, start: int = 0) -> Self:
        return cls(query.context, node, start, query.targets, beside=query.beside or NO_EXTRAS)

    @property
    def outputs(self) -> range:
        """All positions after which logits are wanted."""
        return range(self.first, self.stop)

    def outputs_in(self, start: int, stop: int) -> range:
        """Return the positions from ``start`` to ``stop`` after which logits are wanted."""
        return range(max(start, self.first), min(stop, self.stop))

    def parts(self, size: int) -> list[range]:
        """Return all outputs, divided into parts of at most ``size``."""
        outputs = self.outputs
        return [outputs[i : i + size] for i in range(0, len(outputs), size)]

    def has_nan(self, outputs: Iterable[int]) -> bool:
        """Return whether NaN came of some of its outputs."""
        if self.row is not None:
            return self.row.is_nan
        if not self.targets:
            return False
        own = self.scores[:, 0]
        if isinstance(outputs, range) and outputs.step == 1:  # as a view
            own = own[outputs.start - self.first : outputs.stop - self.first]
        else:
            own = own[[i - self.first for i in outputs]]
        return bool(np.isnan(own).any())

    @property
    def answer(self) -> Row | torch.Tensor:
        if self.targets:
            scores = torch.from_numpy(self.scores)
            return scores[:, 0].float() if self.beside == NO_EXTRAS else scores.clone()
        assert self.row is not None
        return self.row
