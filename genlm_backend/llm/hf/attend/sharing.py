"""Which stretches of cached tokens the rows of a pass read together; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.cache import PADDING_SLOT, Run
from genlm_backend.llm.hf.packing import Span

FEW_TOKENS = 384
"""Cached tokens, counted for each row that reads them, that cost as much as a product of their own.

Below, the small operators of a product and of merging it take longer than copying the tokens out
of their slots.
"""

MANY_NEW_TOKENS: Final = 16
"""New tokens of a row from which on whatever it has cached is worth a product of its own.

Copied beside the new ones, cached tokens would need a mask as high as there are new tokens.
"""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Cached tokens, and the rows whose contexts all have them.

    Attributes:
        rows: Rows of the pass, ascending.
        positions: int64 ``[n]``: where the tokens stand in the contexts, ascending.
        slots: int64 ``[n]``: their slots.
    """

    rows: tuple[int, ...]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.slots)

    @property
    def is_consecutive(self) -> bool:
        """Whether the slots follow one another, so that they can be read where they lie."""
        return bool((np.diff(self.slots) == 1).all())

    def only(self, chosen: NDArray[np.bool_]) -> Part:
        """Return the tokens of a mask ``[n]``."""
        return Part(self.rows, self.positions[chosen], self.slots[chosen])


@final
@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """What the rows of a pass read each for itself, side by side: ``P`` columns, then the new ones.

    Columns are padded on the left, new tokens on the right.

    Attributes:
        slots: int64 ``[B, P]``: the slot behind each column; padding is slot 0.
        positions: int64 ``[B, P]``: its position in the row's context; -1 for padding.
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """How a pass reads what is cached.

    Attributes:
        parts: Stretches that are read once for all of their rows.
        rest: Everything else.
    """

    parts: tuple[Part, ...]
    rest: Rest


def plan_reading(spans: Sequence[Span], few_tokens: int) -> Reading:
    """Divide what the rows of a pass have cached into parts and a rest.

    Args:
        spans: The rows.
        few_tokens: Such as ``FEW_TOKENS``.
    """
    is_long = [span.num_new >= MANY_NEW_TOKENS for span in spans]
    parts: list[Part] = []
    alone: list[list[Part]] = [[] for _ in spans]
    for piece in _by_rows(spans):
        lying, others = _divide(piece, few_tokens)
        parts += lying
        num_saved = (len(piece.rows) - 1) * len(others)  # they are copied once
        if len(others) and (num_saved >= few_tokens or any(is_long[row] for row in piece.rows)):
            parts.append(others)
        elif len(others):
            for row in piece.rows:
                alone[row].append(others)
    return Reading(tuple(parts), _rest(alone))


def _by_rows(spans: Sequence[Span]) -> list[Part]:
    """Return what is cached, divided by the rows that have it."""
    readers: defaultdict[tuple[object, int], list[tuple[int, int, Run]]] = defaultdict(list)
    for row, span in enumerate(spans):
        position = 0
        for run in span.past:
            if run.num_tokens:
                readers[run.owner, position].append((run.num_tokens, row, run))
            position += run.num_tokens
    pieces: defaultdict[tuple[int, ...], list[tuple[int, NDArray[np.int64]]]] = defaultdict(list)
    for (_, position), found in readers.items():
        found.sort(key=lambda reader: reader[:2])
        slots, start = np.asarray(found[-1][2].slots, np.int64), 0
        for index, (stop, _, _) in enumerate(found):
            if stop > start:
                rows = tuple(sorted(row for _, row, _ in found[index:]))
                pieces[rows].append((position + start, slots[start:stop]))
                start = stop
    parts: list[Part] = []
    for rows, chain in pieces.items():
        chain.sort(key=lambda piece: piece[0])
        positions = [np.arange(start, start + len(slots)) for start, slots in chain]
        slots = [slots for _, slots in chain]
        parts.append(Part(rows, np.concatenate(positions), np.concatenate(slots)))
    return parts


def _divide(piece: Part, few_tokens: int) -> tuple[list[Part], Part]:
    """Return the stretches of a piece that are worth being read where they lie, and the others."""
    if piece.is_consecutive:
        stretches = [np.arange(len(piece))]
    else:
        breaks = np.flatnonzero(np.diff(piece.slots) != 1) + 1
        stretches = np.split(np.arange(len(piece)), breaks)
    is_other = np.ones(len(piece), bool)
    lying: list[Part] = []
    for stretch in stretches:
        if len(stretch) * len(piece.rows) >= few_tokens and 2 * len(stretch) > few_tokens:
            is_other[stretch] = False
            lying.append(Part(piece.rows, piece.positions[stretch], piece.slots[stretch]))
    return lying, piece.only(is_other)


def _rest(alone: Sequence[Sequence[Part]]) -> Rest:
    num_past = max(sum(map(len, parts)) for parts in alone)
    slots = np.full((len(alone), num_past), PADDING_SLOT, np.int64)
    positions = np.full((len(alone), num_past), -1, np.int64)
    for row, parts in enumerate(alone):
        if parts:
            order = np.argsort(np.concatenate([part.positions for part in parts]))
            first = num_past - len(order)
            slots[row, first:] = np.concatenate([part.slots for part in parts])[order]
            positions[row, first:] = np.concatenate([part.positions for part in parts])[order]
    return Rest(slots, positions)
