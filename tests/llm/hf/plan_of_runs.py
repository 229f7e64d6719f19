"""The reading of spans whose pasts are runs of owners, by objects, as an oracle."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.reading import MANY_NEW_TOKENS, Part, Rest
from genlm_backend.prefix import PADDING_SLOT


class Run(NamedTuple):
    """The first slots of an owner; in one pass, its runs begin with the same tokens in them."""

    owner: object
    slots: Sequence[int]
    num_tokens: int


class Span(NamedTuple):
    """New tokens of a context, and the runs that it has before them."""

    num_new: int
    past: tuple[Run, ...] = ()

    @property
    def past_slots(self):
        """Return the slots of the tokens before its new ones."""
        return [slot for run in self.past for slot in run.slots[: run.num_tokens]]


class Planned(NamedTuple):
    """How a pass reads what is cached."""

    parts: list[Part]
    rest: Rest


def plan_reading(spans, few_tokens):
    """Divide what the rows of a pass have cached into parts and a rest.

    Args:
        spans: The rows.
        few_tokens: Such as ``FEW_TOKENS``.
    """
    is_long = [span.num_new >= MANY_NEW_TOKENS for span in spans]
    pieces, rests = _by_rows(spans, 0 if any(is_long) else few_tokens // 2)
    parts: list[Part] = []
    for piece in pieces:
        lying, others = _divide(piece, few_tokens)
        parts += lying
        num_saved = (len(piece.rows) - 1) * len(others)  # they are copied once
        if len(others) and (num_saved >= few_tokens or any(is_long[row] for row in piece.rows)):
            parts.append(others)
        elif len(others):
            for row in piece.rows:
                rests[row].append(_Stretch(others.positions, others.slots))
    return Planned(parts, _rest(rests))


class _Stretch(NamedTuple):
    """Cached tokens of one row.

    Attributes:
        positions: Where they stand in the context, ascending.
        slots: Their slots.
    """

    positions: NDArray[np.int64]
    slots: Sequence[int] | NDArray[np.int64]


def _by_rows(spans: Sequence[Span], few_tokens: int) -> tuple[list[Part], list[list[_Stretch]]]:
    """Divide what is cached by the rows that have it.

    Returns:
        Stretches of any length, and for each row those of its own that have few tokens.
    """
    readers: defaultdict[tuple[object, int], list[tuple[int, int, Run]]] = defaultdict(list)
    for row, span in enumerate(spans):
        position = 0
        for run in span.past:
            if run.num_tokens:
                readers[run.owner, position].append((run.num_tokens, row, run))
            position += run.num_tokens
    pieces: defaultdict[tuple[int, ...], list[_Stretch]] = defaultdict(list)
    rests: list[list[_Stretch]] = [[] for _ in spans]
    positions = np.arange(max(len(span.past_slots) for span in spans))
    for (_, first), found in readers.items():
        num_tokens, row, run = found[0]
        if len(found) == 1 and num_tokens <= few_tokens:
            slots = run.slots if num_tokens == len(run.slots) else run.slots[:num_tokens]
            rests[row].append(_Stretch(positions[first : first + num_tokens], slots))
            continue
        found.sort(key=lambda reader: reader[:2])
        slots, start = np.asarray(found[-1][2].slots, np.int64), 0
        for index, (stop, _, _) in enumerate(found):
            if stop > start:
                rows = tuple(sorted(row for _, row, _ in found[index:]))
                own = positions[first + start : first + stop]
                pieces[rows].append(_Stretch(own, slots[start:stop]))
                start = stop
    return [_joined(rows, own) for rows, own in pieces.items()], rests


def _joined(rows: tuple[int, ...], stretches: list[_Stretch]) -> Part:
    stretches.sort(key=lambda stretch: int(stretch.positions[0]))
    positions = np.concatenate([stretch.positions for stretch in stretches])
    return Part(np.array(rows), positions, np.concatenate([stretch.slots for stretch in stretches]))


def _divide(piece: Part, few_tokens: int) -> tuple[list[Part], Part]:
    """Return the stretches of a piece that are worth being read where they lie, and the others."""
    bounds = [0, *(np.flatnonzero(np.diff(piece.slots) != 1) + 1).tolist(), len(piece)]
    is_other = np.ones(len(piece), bool)
    lying: list[Part] = []
    for start, stop in itertools.pairwise(bounds):
        size = stop - start
        if size * len(piece.rows) >= few_tokens and 2 * size > few_tokens:
            is_other[start:stop] = False
            lying.append(Part(piece.rows, piece.positions[start:stop], piece.slots[start:stop]))
    return lying, Part(
        piece.rows, piece.positions[is_other], piece.slots[is_other]
    ) if lying else piece


def _rest(rests: Sequence[list[_Stretch]]) -> Rest:
    sizes = np.array([sum([len(one.slots) for one in stretches]) for stretches in rests])
    num_past = int(sizes.max())
    slots = np.full((len(rests), num_past), PADDING_SLOT, np.int64)
    positions = np.full((len(rests), num_past), -1, np.int64)
    if num_past:
        is_there = np.arange(num_past) >= num_past - sizes[:, None]
        stretches = [*chain.from_iterable(rests)]
        slots[is_there] = np.concatenate([one.slots for one in stretches])
        positions[is_there] = np.concatenate([one.positions for one in stretches])
    return Rest.of(slots, positions)
