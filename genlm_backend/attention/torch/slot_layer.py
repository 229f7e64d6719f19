"""Layers of a cache of transformers, and the keys and values that go into slots through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from genlm_backend.attention.forward_batch import ForwardBatch
from genlm_backend.prefix.codecs import Codec
from genlm_backend.prefix.kv_pool import KVPool

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values."""


class SlotLayer(CacheLayerMixin):
    """One layer of a cache whose keys and values are in slots."""

    # Even if the model has windows: masks are made for all positions.
    is_sliding = False

    def __init__(self, max_prefix_len: int, take: Callable[[Tensor, Tensor], Pair]) -> None:
        super().__init__()
        self.max_prefix_len, self._take = max_prefix_len, take
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Have new keys and values taken, ``[B, heads, Q, dim]``; return what is attended to."""
        return self._take(key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the slots exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of past and new together, and the offset of the first column: 0."""
        return self.max_prefix_len + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.max_prefix_len

    def get_max_length(self) -> int:
        return -1


def write_new(pool: KVPool, layer: int, batch: ForwardBatch, keys: Tensor, values: Tensor) -> Pair:
    """Store new keys and values of a layer, ``[B, heads, Q, dim]``, without the padding."""
    slots, columns = batch.new_on(pool.layout.layers[layer].device)
    rows = pool.write(layer, slots, by_token(keys, values, columns))
    return (keys, values) if pool.is_exact else by_head(rows, columns, keys, values)


def by_token(keys: Tensor, values: Tensor, columns: Tensor | None) -> Tensor:
    """From ``[B, heads, Q, dim]`` each to rows of both, ``[num_new, width]``, without padding."""
    states = [keys.transpose(1, 2), values.transpose(1, 2)]  # [B, Q, heads, dim]
    if keys.shape[3] != values.shape[3]:
        states = [of_heads.flatten(2) for of_heads in states]
    rows = torch.cat(states, 2).reshape(len(keys) * keys.shape[2], -1)
    return rows if columns is None else rows.index_select(0, columns)


def by_head(rows: Tensor, columns: Tensor | None, keys: Tensor, values: Tensor) -> Pair:
    """From rows back to keys and values in the shapes of those given, the padding zeros."""
    num_rows, num_heads, num_new, dim = keys.shape
    if columns is not None:
        padded = rows.new_zeros(num_rows * num_new, rows.shape[1])
        rows = padded.index_copy_(0, columns, rows)
    found = rows.view(num_rows, num_new, -1).tensor_split([num_heads * dim], 2)
    kept = [
        part.unflatten(2, (states.shape[1], states.shape[3])).transpose(1, 2)
        for part, states in zip(found, (keys, values), strict=True)
    ]
    return kept[0], kept[1]


def as_read(codec: Codec, keys: Tensor, values: Tensor) -> Pair:
    """Return keys and values, ``[B, heads, Q, dim]``, as they would be read from a pool."""
    codes = codec.encode(by_token(keys, values, None))
    return by_head(codec.decode(codes), None, keys, values)
