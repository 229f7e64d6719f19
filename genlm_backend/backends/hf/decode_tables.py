"""DecodeTables: the plan of a decode step, as tables that fit into those of a captured pass.

Extents of consecutive slots are read once for all rows that share them. Each row's other tokens,
and its new one, are read slot by slot. Layers with a window read the last tokens of each row slot
by slot.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.cascade_plan import CachedPrefixes, CascadePlan, SharedPrefix
from genlm_backend.prefix.slot_allocator import ranges_in_a_row

MAX_SPLITS: Final = 32
"""Largest number of extents per row after division; beyond it, extents stay undivided."""

MAX_RUNS: Final = 16
"""Largest number of runs of consecutive slots in a prefix that is read by extents."""

NUM_BLOCKS: Final = 264
"""Blocks of queries, by extent and head, that keep a device busy: twice the multiprocessors of an
H100. With at most half as many, long extents are divided: an H100 then reads 4,096 tokens for one
row in 26 us instead of 80, and takes no longer for many rows."""

QUERIES_OF_BLOCK: Final = 128
"""Queries in a block of the operator for extents."""

SHORTEST_SPLIT: Final = 128
"""Fewest tokens in a part of a divided extent."""

MANY_READ: Final = 1 << 14
"""Tokens of a prefix times its rows, beyond which the prefix is read by extents. With less, for
example 128 tokens for 64 rows, an H100 takes 9 us slot by slot, and 15 by extents."""

LONG: Final = 512
"""Tokens of a prefix beyond which extents are faster even for a few rows."""

FEW_SLOTS: Final = 64
"""Least capacity of a captured pass for tokens read slot by slot, for each row. Capacity costs next
to nothing, while another capture for lack of it takes a tenth of a second."""


class DecodeShape(NamedTuple):
    """The shape of the tables of a decode step."""

    rows: int
    tokens: int
    splits: int
    extents: int
    window: int = 0

    def holds(self, other: DecodeShape) -> bool:
        """Whether this shape has room for ``other``'s tables, and at most twice as many rows."""
        return (
            self.window == other.window
            and self.rows <= 2 * other.rows
            and all(map(operator.ge, self, other))
        )


@final
class Extents(NamedTuple):
    """Tables of the extents that rows of a decode step read, and prefixes read slot by slot."""

    starts: NDArray[np.int64]  # first slots, int64 [extents]
    sizes: NDArray[np.int64]  # int64 [extents]
    readers: NDArray[np.int64]  # rows, extent by extent: int64 [num_readers.sum()]
    num_readers: NDArray[np.int64]  # int64 [extents]
    splits: NDArray[np.int64]  # [B, splits] int64
    apart: tuple[SharedPrefix, ...]  # shared prefixes that are read slot by slot


@final
class DecodeTables(NamedTuple):
    """Tables of the slots that the ``B`` rows of a decode step read."""

    slots: NDArray[np.int64]  # [tokens] int64
    counts: NDArray[np.int64]  # [B] int64
    shared: Extents
    recent: NDArray[np.int64]  # [B, window] int64
    num_recent: NDArray[np.int64]  # [B] int64

    @classmethod
    def of(
        cls,
        plan: CascadePlan,
        past: CachedPrefixes,
        slot_mapping: NDArray[np.int64],
        group_size: int,
        num_key_heads: int,
        window: int = 0,
    ) -> DecodeTables:
        num_rows = len(slot_mapping)
        shared = _extents_of(plan.prefixes, num_rows, group_size, num_key_heads)
        slots, counts = _slot_by_slot(plan, shared.apart, slot_mapping)
        recent = np.empty((num_rows, window), np.int64)
        if window:
            recent[:, 0] = slot_mapping
            past.write_last(recent[:, 1:])
        return cls(slots, counts, shared, recent, np.minimum(plan.prefix_lens + 1, window))

    @property
    def shape(self) -> DecodeShape:
        """The smallest shape for captured passes that the tables fit into."""
        num_rows = _rounded_rows(len(self.counts))
        per_row = FEW_SLOTS
        while num_rows * per_row < len(self.slots):
            per_row *= 8
        splits, starts = self.shared.splits, self.shared.starts
        num_splits = splits.shape[1] and _power_of_two(splits.shape[1])
        # The capacity for extents is kept small, since the operator launches blocks for all of it.
        most = num_rows * num_splits
        room = next((size for size in (4, 16, 64) if len(starts) <= size), most)
        num_extents, window = min(most, room), self.recent.shape[1]
        return DecodeShape(num_rows, num_rows * per_row, num_splits, num_extents, window)


@functools.lru_cache(maxsize=8)
def _extents_of(
    prefixes: tuple[SharedPrefix, ...], num_rows: int, group_size: int, num_key_heads: int
) -> Extents:
    """Return the extents of prefixes; cached, since prefixes rarely change between steps."""
    in_place: list[tuple[SharedPrefix, list[tuple[int, int]]]] = []
    apart: list[SharedPrefix] = []
    for prefix in prefixes:
        ranges, slots = ranges_in_a_row(prefix.slots), prefix.slots.tolist()
        runs = [(slots[first], stop - first) for first, stop in ranges]
        is_small = len(prefix) <= LONG and len(prefix) * len(prefix.rows) <= MANY_READ
        if is_small or len(runs) > MAX_RUNS:
            apart.append(prefix)
        else:
            in_place.append((prefix, runs))
    extents = _divided(in_place, group_size, num_key_heads)
    splits = _splits(extents, num_rows)
    if splits.shape[1] > MAX_SPLITS:
        extents = [(prefix.rows, *run) for prefix, runs in in_place for run in runs]
        splits = _splits(extents, num_rows)
    readers = [rows for rows, _, _ in extents]
    return Extents(
        np.array([start for _, start, _ in extents], np.int64),
        np.array([size for _, _, size in extents], np.int64),
        np.concatenate(readers) if readers else np.empty(0, np.int64),
        np.array([len(rows) for rows in readers], np.int64),
        splits,
        tuple(apart),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _rounded_rows(number: int) -> int:
    """Round a number of rows up to a power of two or, above 16, three quarters of one."""
    power = _power_of_two(number)
    return 3 * power // 4 if power > 16 and number <= 3 * power // 4 else power


def num_extents(size: int, num_rows: int, num_blocks: int) -> int:
    """Return the number of extents that a run of slots is divided into."""
    # A run in more extents is read sooner, but each row merges more results. So the best number
    # grows as the square root of the tokens per row. On an H100, the rule's choice takes at most a
    # fifth longer than the fastest, for 1 to 1,024 rows and 32 to 32,768 tokens.
    most = min(16, NUM_BLOCKS // max(1, num_blocks), size // SHORTEST_SPLIT)
    return max(1, min(most, math.isqrt(size // num_rows)))


def _divided(
    prefixes: Sequence[tuple[SharedPrefix, list[tuple[int, int]]]],
    group_size: int,
    num_key_heads: int,
) -> list[tuple[NDArray[np.int64], int, int]]:
    """Return extents (rows, first slot, size), long ones divided to keep a device busy."""
    num_blocks = sum(
        num_key_heads * -(-len(prefix.rows) * group_size // QUERIES_OF_BLOCK) * len(runs)
        for prefix, runs in prefixes
    )
    found: list[tuple[NDArray[np.int64], int, int]] = []
    for prefix, runs in prefixes:
        for start, size in runs:
            count = num_extents(size, len(prefix.rows), num_blocks)
            bounds = [start + size * i // count for i in range(count + 1)]
            found += [
                (prefix.rows, first, stop - first) for first, stop in itertools.pairwise(bounds)
            ]
    return found


def _splits(
    extents: Sequence[tuple[NDArray[np.int64], int, int]], num_rows: int
) -> NDArray[np.int64]:
    """Return each row's indices among the readers of all extents: ``[B, splits]``, -1 for none."""
    if not extents:
        return np.empty((num_rows, 0), np.int64)
    if all(len(rows) == num_rows for rows, _, _ in extents):  # the usual case
        first = np.arange(len(extents)) * num_rows
        return first + np.arange(num_rows)[:, None]
    readers = np.concatenate([rows for rows, _, _ in extents])
    order = np.argsort(readers, kind="stable")
    rows = readers[order]
    counts = np.bincount(readers, minlength=num_rows)
    column = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    splits = np.full((num_rows, counts.max()), -1, np.int64)
    splits[rows, column] = order
    return splits


def _slot_by_slot(
    plan: CascadePlan, prefixes: Sequence[SharedPrefix], slot_mapping: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slots that are read one by one, joined row by row, and how many each row has."""
    num_rows = len(slot_mapping)
    columns = np.concatenate([plan.suffix[0], slot_mapping[:, None]], 1)
    is_there = np.ones(columns.shape, np.bool_)
    if plan.is_padded:
        is_there[:, :-1] = plan.suffix[1] >= 0
    if not prefixes:
        if is_there.all():
            return columns.reshape(-1), np.full(num_rows, columns.shape[1], np.int64)
        return columns[is_there], is_there.sum(1)
    own = np.nonzero(is_there)[0]
    rows = np.concatenate([own, *(np.repeat(prefix.rows, len(prefix)) for prefix in prefixes)])
    slots = np.concatenate(
        [columns[is_there], *(np.tile(prefix.slots, len(prefix.rows)) for prefix in prefixes)]
    )
    return slots[np.argsort(rows, kind="stable")], np.bincount(rows, minlength=num_rows)
