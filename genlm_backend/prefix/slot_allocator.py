"""SlotAllocator: which slots are free; a slot is for one token's keys and values in all layers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import CacheError, OutOfSlotsError

PADDING_SLOT: Final = 0
"""The slot that padding points at: its codes are zero, and it is never allocated."""


def ranges_in_a_row(*numbers: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the index ranges ``(start, stop)`` in which all arrays grow by one per element."""
    is_break = np.any([np.diff(each) != 1 for each in numbers], axis=0)
    bounds = [0, *(np.flatnonzero(is_break) + 1).tolist(), len(numbers[0])]
    return list(itertools.pairwise(bounds)) if len(numbers[0]) else []


@final
class SlotAllocator:
    """The free slots of a pool, by number. Numbers begin at 1; slot 0 is for padding."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_used = 0
        # Slots from this number on were never allocated. They need no entries in the indexes below,
        # and their memory is untouched.
        self._next_unused = 1
        # Freed slots form ranges with gaps between them, indexed by start, by stop and by size.
        self._stops: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        """Number of slots that ``allocate`` can return now."""
        return self.num_slots - self.num_used

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Allocate slots, consecutive if a free range is long enough: int64 ``[count]``."""
        if count > self.num_slots - self.num_used:
            raise OutOfSlotsError(f"{count} slots requested, {self.num_free} free")
        self.num_used += count
        taken, missing = [np.empty(0, np.int64)], count
        while missing:
            found = bisect.bisect_left(self._by_size, (missing, 0))
            if found < len(self._by_size):  # best fit: the shortest range that is long enough
                start = self._take(*self._by_size[found], missing)
                size = missing
            elif self._next_unused + missing <= self.num_slots + 1 or not self._by_size:
                start, self._next_unused = self._next_unused, self._next_unused + missing
                size = missing
            else:
                size, start = self._by_size[-1]
                self._take(size, start, size)
            taken.append(np.arange(start, start + size))
            missing -= size
        return np.concatenate(taken) if len(taken) > 2 else taken[-1]

    def free(self, slots: Sequence[int] | NDArray[Any]) -> None:
        if not len(slots):
            return
        self.num_used -= len(slots)
        if self.num_used < 0:
            raise CacheError(f"{self.num_free} slots are free, but the pool has {self.num_slots}")
        ordered = np.sort(np.asarray(slots))
        ends = np.flatnonzero(np.diff(ordered) != 1)
        starts = ordered[np.concatenate([[0], ends + 1])].tolist()
        stops = (ordered[np.concatenate([ends, [-1]])] + 1).tolist()
        for start, stop in zip(starts, stops, strict=True):
            self._put(start, stop)

    def _take(self, size: int, start: int, count: int) -> int:
        """Take the first ``count`` slots of a free range; return its start."""
        self._remove(start, start + size)
        if count < size:
            self._add(start + count, start + size)
        return start

    def _put(self, start: int, stop: int) -> None:
        """Add a free range, merged with free neighbours."""
        if start in self._starts:
            before = self._starts[start]
            self._remove(before, start)
            start = before
        if stop in self._stops:
            after = self._stops[stop]
            self._remove(stop, after)
            stop = after
        self._add(start, stop)

    def _add(self, start: int, stop: int) -> None:
        if start in self._stops:
            raise CacheError("a slot was freed twice")
        self._stops[start], self._starts[stop] = stop, start
        bisect.insort(self._by_size, (stop - start, start))

    def _remove(self, start: int, stop: int) -> None:
        del self._stops[start], self._starts[stop]
        del self._by_size[bisect.bisect_left(self._by_size, (stop - start, start))]
