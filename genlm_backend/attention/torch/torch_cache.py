"""A transformers cache over slots of a pool of keys and values, with recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from genlm_backend.attention.forward_batch import BatchStates, ForwardBatch
from genlm_backend.prefix.codecs import Codec
from genlm_backend.prefix.kv_pool import KVPool
from genlm_backend.prefix.state_cache import CacheLayer, StateLayout

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values."""


class SlotLayer(CacheLayerMixin):
    """One layer of a transformers cache whose keys and values are in slots."""

    # False even for sliding-window models: the masks cover all positions.
    is_sliding = False

    def __init__(self, max_prefix_len: int, take: Callable[[Tensor, Tensor], Pair]) -> None:
        super().__init__()
        self.max_prefix_len, self._take = max_prefix_len, take
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store new keys and values, ``[B, heads, Q, dim]``; return those to attend to."""
        return self._take(key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the slots exist already."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions there are, cached or new, and the offset of the first: 0."""
        return self.max_prefix_len + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.max_prefix_len

    def get_max_length(self) -> int:
        return -1


def write_new(pool: KVPool, layer: int, batch: ForwardBatch, keys: Tensor, values: Tensor) -> Pair:
    """Store new keys and values, ``[B, heads, Q, dim]``, but no padding; return all as decoded."""
    slots, columns = batch.new_on(pool.layout.layers[layer].device)
    rows = pool.write(layer, slots, by_token(keys, values, columns))
    return (keys, values) if pool.is_exact else by_head(rows, columns, keys, values)


def by_token(keys: Tensor, values: Tensor, columns: Tensor | None) -> Tensor:
    """Return ``[B, heads, Q, dim]`` keys and values as unpadded rows: ``[num_new, width]``."""
    states = [keys.transpose(1, 2), values.transpose(1, 2)]  # [B, Q, heads, dim]
    if keys.shape[3] != values.shape[3]:
        states = [of_heads.flatten(2) for of_heads in states]
    rows = torch.cat(states, 2).reshape(len(keys) * keys.shape[2], -1)
    return rows if columns is None else rows.index_select(0, columns)


def by_head(rows: Tensor, columns: Tensor | None, keys: Tensor, values: Tensor) -> Pair:
    """Return rows of ``by_token`` as keys and values, shaped like the given ones, padded with 0."""
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
    """Return keys and values, ``[B, heads, Q, dim]``, rounded as in a pool with this codec."""
    codes = codec.encode(by_token(keys, values, None))
    return by_head(codec.decode(codes), None, keys, values)


def transformers_cache(
    slot_layers: Iterable[SlotLayer], layout: StateLayout, states: BatchStates | None
) -> Cache:
    """Return a cache of slot layers and, if the model has any, recurrent layers."""
    if not layout.layers:
        return Cache(layers=[*slot_layers])
    slots = iter(slot_layers)

    def attention_layer(num_states: int) -> Any:
        layer = next(slots)
        return _AttendingStateLayer(layer, num_states) if num_states else layer

    layers = cache_layers(layout.layers, attention_layer)
    if states is not None:
        states.begin(layers)
    return Cache(layers=layers)


def cache_layers(layers: Iterable[CacheLayer], attention_layer: Callable[[int], Any]) -> list[Any]:
    """Return cache layers; ``attention_layer(num_states)`` makes each layer that attends."""
    found: list[Any] = []
    for layer in layers:
        if layer.attends:
            found.append(attention_layer(layer.num_states))
        elif layer.num_states:
            found.append(LinearAttentionLayer(number_of_states=layer.num_states))
        else:
            found.append(cast(Any, cache_utils).DummyLayer())
    return found


@final
class TorchBatchStates(BatchStates):
    """The recurrent states of a pass's rows, in the layers of a transformers cache."""

    def __init__(self, layout: StateLayout, before: Sequence[Tensor] | None) -> None:
        self._layout, self._before = layout, before
        self._layers: list[Any] = []

    def begin(self, layers: list[Any]) -> None:
        self._layers = layers
        if self._before is None:
            return
        for tensor, state in zip(self._layout.tensors, self._before, strict=True):
            layer, index = layers[tensor.layer], tensor.index
            getattr(layer, tensor.name)[index] = state
            getattr(layer, f"is_{tensor.name}_initialized")[index] = True
            layer.has_previous_state[index] = True
            if tensor.name == "conv_states":
                layer.conv_kernel_size[index] = state.shape[-1]
                layer.dtype, layer.device = state.dtype, state.device
        self._before = None

    def behind(self, rows: NDArray[np.int64]) -> list[Tensor]:
        tensors = self._layout.tensors
        found = [getattr(self._layers[t.layer], t.name)[t.index] for t in tensors]
        if all(len(state) == len(rows) for state in found):
            return found
        index = torch.from_numpy(rows)
        return [state.index_select(0, index.to(state.device)) for state in found]


@final
class _AttendingStateLayer(LinearAttentionAndFullAttentionLayer):
    """One cache layer with keys and values in slots, and recurrent states."""

    def __init__(self, slots: SlotLayer, num_states: int) -> None:
        super().__init__(number_of_states=num_states)
        self._slots = slots
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        return self._slots.update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._slots.get_seq_length()
