"""Slots: which of them are free; each holds one token's keys and values across all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from genlm_backend.errors import CacheError, OutOfSlotsError

PADDING_SLOT: Final = 0
"""The slot that padding points at: all zeros, never written, never handed out."""


@final
class Slots:
    """The free list of a store: slots by number, each free or handed out, and no tensors.

    Slots are numbered from 1; slot 0 is for padding.

    Args:
        num_slots: Number of slots that can be handed out.

    Attributes:
        num_slots: As given.
        num_used: Number of slots handed out and not returned.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_used = 0
        # Slots never used yet are handed out in order behind a high-water mark, so that a large
        # store costs no list of a million integers, and no memory before it is needed.
        self._free: list[int] = []
        self._next_unused = 1

    @property
    def num_free(self) -> int:
        """Number of slots that ``allocate`` could hand out now."""
        return self.num_slots - self.num_used

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` slots.

        Raises:
            OutOfSlotsError: If fewer are free; none is taken then.
        """
        if count > self.num_slots - self.num_used:
            raise OutOfSlotsError(f"{count} slots asked for, {self.num_free} free")
        self.num_used += count
        num_recycled = min(count, len(self._free))
        slots = self._free[len(self._free) - num_recycled :]
        del self._free[len(self._free) - num_recycled :]
        num_new = count - num_recycled
        slots.extend(range(self._next_unused, self._next_unused + num_new))
        self._next_unused += num_new
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Return slots that ``allocate`` handed out."""
        self._free.extend(slots)
        self.num_used -= len(slots)
        if self.num_used < 0:
            raise CacheError(f"more slots were returned than exist: {self.num_free}")

    @property
    def num_touched(self) -> int:
        """Number of slots handed out at least once: those numbered 1 to this."""
        return self._next_unused - 1

    def recycled(self) -> set[int]:
        """Return the slots handed out and returned; those never handed out are free too.

        Raises:
            CacheError: If a slot is on the free list twice or does not exist.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise CacheError("a slot is free twice")
        if free and not (min(free) > PADDING_SLOT and max(free) < self._next_unused):
            raise CacheError("a slot is free that was never handed out")
        return free
