"""A transformers cache whose keys and values live in the slots of a KVPool."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from genlm_backend.cache.pool import KVPool, LayerLayout
from genlm_backend.llm.hf.packing import PackedBatch


class _DeviceIndices:
    """The index tensors of one batch, moved once to each device that has a layer."""

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch
        self._by_device: dict[
            torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
        ] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return ``(gather, new_slots, new_columns)`` on ``device``."""
        if device not in self._by_device:
            columns = self._batch.new_columns
            self._by_device[device] = (
                self._batch.gather.to(device),
                self._batch.new_slots.to(device),
                None if columns is None else columns.to(device),
            )
        return self._by_device[device]


class PooledLayer(CacheLayerMixin):
    """One layer: new keys and values go into their slots, past and new ones come out gathered.

    It always hands out the whole past, so it is not a sliding layer even where the model slides
    a window over it: the mask does that.
    """

    is_sliding = False

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: LayerLayout,
        num_past: int,
        indices: _DeviceIndices,
    ) -> None:
        super().__init__()
        self._key_slots, self._value_slots = keys, values
        self._layout, self._num_past, self._indices = layout, num_past, indices
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[B, heads, Q, dim]`` and return ``[B, heads, P + Q, dim]``, keys and values."""
        gather, new_slots, new_columns = self._indices.on(self._layout.device)
        pairs = ((self._key_slots, key_states), (self._value_slots, value_states))
        keys, values = (
            _store_and_gather(slots, states, gather, new_slots, new_columns)
            for slots, states in pairs
        )
        return keys, values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the slots exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of past and new together, and the offset of the first column: 0."""
        return self._num_past + int(query_length), 0

    def get_seq_length(self) -> int:
        """Return ``P``, the columns before the new tokens."""
        return self._num_past

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1


def _store_and_gather(
    slots: torch.Tensor,
    states: torch.Tensor,
    gather: torch.Tensor,
    new_slots: torch.Tensor,
    new_columns: torch.Tensor | None,
) -> torch.Tensor:
    num_rows, num_heads, num_new, dim = states.shape
    new = states.transpose(1, 2).reshape(num_rows * num_new, num_heads * dim)
    if new_columns is not None:
        new = new.index_select(0, new_columns)
    slots.index_copy_(0, new_slots, new)
    return slots.index_select(0, gather).view(num_rows, -1, num_heads, dim).transpose(1, 2)


def pooled_cache(pool: KVPool, batch: PackedBatch) -> Cache:
    """Return the cache for one forward pass of ``batch`` over the slots of ``pool``."""
    indices = _DeviceIndices(batch)
    return Cache(
        layers=[
            PooledLayer(keys, values, layout, batch.num_past, indices)
            for keys, values, layout in zip(pool.keys, pool.values, pool.layout.layers, strict=True)
        ]
    )
