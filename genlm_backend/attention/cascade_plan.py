"""Which stretches of cached tokens the rows of a pass read together; pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.cached_prefixes import CachedPrefixes
from genlm_backend.attention.cascade_loops import divide

FEW_TOKENS = 384
"""Cached tokens, times the rows that read them, that cost as much as a product of their own."""
# Below, the small operators of a product and of merging it take longer than copying the tokens.

MANY_NEW_TOKENS: Final = 16
"""New tokens of a row from which on whatever it has cached is worth a product of its own."""
# Copied next to the new ones, cached tokens would need a mask as high as there are new tokens.


@final
@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Cached tokens, and the rows whose contexts all have them."""

    rows: NDArray[np.int64]  # [G] int64
    positions: NDArray[np.int64]  # [n] int64
    slots: NDArray[np.int64]  # [n] int64

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def is_consecutive(self) -> bool:
        """Whether the slots follow one another, so that they can be read in place."""
        return bool((np.diff(self.slots) == 1).all())


class _Appended(NamedTuple):
    """A table whose rows are some of another's, with a column more."""

    before: _LazyColumns
    rows: NDArray[np.int64]  # [B] int64
    column: NDArray[np.int64]  # [B] int64


@final
@dataclass(slots=True, eq=False)
class _LazyColumns:
    """Integers ``[B, P]``, computed when they are first read."""

    # Most decode steps read none: a device makes its own from those of the last step.
    made: NDArray[np.int64] | _Appended

    def read(self) -> NDArray[np.int64]:
        made, later = self.made, list[_Appended]()
        while isinstance(made, _Appended):
            later.append(made)
            made = made.before.made
        if not later:
            return made
        rows = np.arange(len(later[0].rows))
        found = np.empty((len(rows), made.shape[1] + len(later)), np.int64)
        for number, grown in enumerate(later, 1):
            found[:, -number] = grown.column[rows]
            rows = grown.rows[rows]
        found[:, : made.shape[1]] = made[rows]
        self.made = found
        return found


@final
@dataclass(frozen=True, slots=True, eq=False)
class Suffix:
    """Slots that each row reads for itself: ``P`` columns, padded on the left, then new ones."""

    num_columns: int
    is_padded: NDArray[np.bool_]  # [B] bool
    _slots: _LazyColumns
    _positions: _LazyColumns

    @classmethod
    def of(cls, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Self:
        is_padded = (positions[:, :1] < 0).sum(1) > 0
        return cls(slots.shape[1], is_padded, _LazyColumns(slots), _LazyColumns(positions))

    @property
    def slots(self) -> NDArray[np.int64]:
        """The slot of each column, int64 ``[B, P]``; padding is slot 0."""
        return self._slots.read()

    @property
    def positions(self) -> NDArray[np.int64]:
        """Its position in the row's context, int64 ``[B, P]``; -1 for padding."""
        return self._positions.read()

    def advanced(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Suffix:
        return Suffix(
            self.num_columns + 1,
            self.is_padded[rows] if self.num_columns else np.zeros(len(rows), np.bool_),
            _LazyColumns(_Appended(self._slots, rows, slots)),
            _LazyColumns(_Appended(self._positions, rows, positions)),
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlanDelta:
    """The way from a plan to that of the next decode step."""

    before: object
    rows: NDArray[np.int64]  # [B] int64
    slots: NDArray[np.int64]  # [B] int64
    prefixes: tuple[int, ...]


MIN_ADDED: Final = 64
"""Columns that a rest may get at least before it is made anew."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class CascadePlan:
    """How a pass reads what is cached."""

    prefixes: tuple[SharedPrefix, ...]
    suffix: Suffix
    prefix_lens: NDArray[np.int64]  # [B] int64
    # How far it is from one that would be made anew: what was read to make it, and its rows then.
    num_columns: int
    num_tokens: int
    origins: NDArray[np.int64]  # [B] int64
    num_repeated: int = 0
    advance: PlanDelta | None = None
    identity: object = field(default_factory=object)

    @classmethod
    def of(cls, past: CachedPrefixes, num_new: NDArray[np.int64], few_tokens: int) -> Self:
        """Divide what the rows of a pass have cached, in time linear in the distinct tokens."""
        # A tree may be large, and most of it is not touched: fresh zeros cost what is written.
        numbers = np.zeros(len(past.parent), np.int32)
        is_long = num_new >= MANY_NEW_TOKENS
        tree = past.parent, past.depth, past.slot
        slots, positions, shared, bounds, starts, num_rows, order, suffix = divide(
            *tree, past.nodes, is_long, few_tokens, numbers
        )
        prefixes: list[SharedPrefix] = []
        for start, stop in itertools.pairwise(bounds.tolist()):
            own = shared[start:stop]
            first, size = starts[own[0]], num_rows[own[0]]
            prefixes.append(
                SharedPrefix(np.sort(order[first : first + size]), positions[own], slots[own])
            )
        age = suffix[0].shape[1], len(shared) + suffix[0].size, np.arange(len(past.nodes))
        return cls(tuple(prefixes), Suffix.of(*suffix), past.num_tokens, *age)

    @property
    def is_stale(self) -> bool:
        """Whether the next step should make a new plan instead of advancing this one."""
        # Tokens that rows have come to share since are copied for each row. A new one pays once the
        # rest is twice as wide, or once as many tokens were copied in vain as making one takes.
        num_added = self.suffix.num_columns - self.num_columns
        return num_added > max(MIN_ADDED, self.num_columns) or self.num_repeated > self.num_tokens

    def advanced(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> CascadePlan:
        """Return the plan of the next decode step, each of whose rows has a token more."""
        prefixes: list[SharedPrefix] = []
        numbers: list[int] = []
        everybody = np.arange(len(rows))
        for number, prefix in enumerate(self.prefixes):
            if len(prefix.rows) == len(self.prefix_lens) == len(rows):
                prefixes.append(prefix)  # the same object, for which tables may have been made
                numbers.append(number)
                continue
            own = everybody
            if len(prefix.rows) < len(self.prefix_lens):
                is_reader = np.zeros(len(self.prefix_lens), bool)
                is_reader[prefix.rows] = True
                own = np.flatnonzero(is_reader[rows])
            if len(own):
                prefixes.append(SharedPrefix(own, prefix.positions, prefix.slots))
                numbers.append(number)
        prefix_lens, origins = self.prefix_lens[rows], self.origins[rows]
        num_others = len(rows) - int(np.count_nonzero(np.bincount(origins)))
        return CascadePlan(
            tuple(prefixes),
            self.suffix.advanced(rows, slots, prefix_lens),
            prefix_lens + 1,
            self.num_columns,
            self.num_tokens,
            origins,
            self.num_repeated + num_others * self.num_columns,
            PlanDelta(self.identity, rows, slots, tuple(numbers)),
        )
