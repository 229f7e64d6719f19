"""KVPool: preallocated keys and values, one token a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from genlm_backend.errors import CacheError, OutOfSlotsError

PADDING_SLOT = 0
"""The slot that padding points at: all zeros, never written, never handed out."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The shape of one token's keys and values in one attention layer.

    Attributes:
        num_key_heads: Heads of the keys.
        key_dim: Elements of one head's key.
        num_value_heads: Heads of the values.
        value_dim: Elements of one head's value; may differ from ``key_dim`` (latent attention).
        dtype: Of both.
        device: Where the layer runs, and so where its slots live.
    """

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values in this layer."""
        elements = self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
        return elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shapes of all layers, first to last."""

    layers: tuple[LayerLayout, ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values across all layers."""
        return sum(layer.bytes_per_slot for layer in self.layers)


class KVPool:
    """Preallocated slots and the list of the free ones.

    ``keys[i]`` and ``values[i]`` are layer ``i``'s buffers, of shapes
    ``[num_slots + 1, num_key_heads * key_dim]`` and ``[num_slots + 1, num_value_heads *
    value_dim]``. On a CPU the operating system provides the memory page by page as slots are
    first written, so that an unused budget costs nothing.

    Args:
        layout: Shapes of the layers.
        budget: Bytes that all buffers together may take, the padding slot included.
    """

    def __init__(self, layout: KVLayout, budget: int) -> None:
        self.layout = layout
        self.budget = budget
        self.num_slots = max(0, budget // max(1, layout.bytes_per_slot) - 1)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer in layout.layers:
            for buffers, width in (
                (self.keys, layer.num_key_heads * layer.key_dim),
                (self.values, layer.num_value_heads * layer.value_dim),
            ):
                buffer = torch.empty(
                    (self.num_slots + 1, width), dtype=layer.dtype, device=layer.device
                )
                buffer[PADDING_SLOT] = 0
                buffers.append(buffer)
        self._reset()

    def _reset(self) -> None:
        # Slots never used yet are handed out in order behind a high-water mark, so that a large
        # pool costs no list of a million integers, and no memory before it is needed.
        self._free: list[int] = []
        self._next_unused = 1

    @property
    def num_free(self) -> int:
        """Slots that ``allocate`` could hand out now."""
        return len(self._free) + self.num_slots + 1 - self._next_unused

    @property
    def num_used(self) -> int:
        """Slots handed out and not returned."""
        return self.num_slots - self.num_free

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots handed out and not returned."""
        return self.num_used * self.layout.bytes_per_slot

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` slots.

        Raises:
            OutOfSlotsError: If fewer are free; none is taken then.
        """
        if count > self.num_free:
            raise OutOfSlotsError(f"{count} slots asked for, {self.num_free} free")
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
        if self.num_free > self.num_slots:
            raise CacheError(f"more slots were returned than exist: {self.num_free}")

    def is_finite(self, slots: Sequence[int]) -> bool:
        """Whether no key and no value of these slots is infinite or NaN."""
        index = torch.tensor(slots, dtype=torch.int64)
        return all(
            bool(buffer[index.to(buffer.device)].isfinite().all())
            for buffer in chain(self.keys, self.values)
        )

    @property
    def num_touched(self) -> int:
        """Slots handed out at least once: those numbered 1 to this."""
        return self._next_unused - 1

    def recycled_slots(self) -> set[int]:
        """The slots handed out and returned, for counting; those never handed out are free too.

        Raises:
            CacheError: If a slot is on the free list twice or does not exist.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise CacheError("a slot is free twice")
        if free and not (min(free) > PADDING_SLOT and max(free) < self._next_unused):
            raise CacheError("a slot is free that was never handed out")
        return free
