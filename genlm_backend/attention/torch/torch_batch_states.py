"""Recurrent states of the rows of a pass, and the cache of transformers that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from genlm_backend.attention.forward_batch import BatchStates
from genlm_backend.attention.torch.slot_layer import Pair, SlotLayer
from genlm_backend.prefix.state_cache import StateLayout


def transformers_cache(
    slot_layers: Iterable[SlotLayer], layout: StateLayout, states: BatchStates | None
) -> Cache:
    """Return a cache of layers that attend and, if a model has such, of layers with states."""
    if not layout.layers:
        return Cache(layers=[*slot_layers])
    slots, layers = iter(slot_layers), list[Any]()
    for layer in layout.layers:
        if layer.is_empty:
            layers.append(empty_layer())
        elif not layer.num_states:
            layers.append(next(slots))
        elif layer.attends:
            layers.append(_AttendingStateLayer(next(slots), layer.num_states))
        else:
            layers.append(LinearAttentionLayer(number_of_states=layer.num_states))
    if states is not None:
        states.begin(layers)
    return Cache(layers=layers)


def empty_layer() -> Any:
    """Return a layer of a cache that holds nothing, if transformers has such layers."""
    return cast(Any, cache_utils).DummyLayer()


@final
class TorchBatchStates(BatchStates):
    """The recurrent states of the rows of one pass, before and after it."""

    def __init__(self, layout: StateLayout, before: Sequence[Tensor] | None) -> None:
        self._layout, self._before = layout, before
        self._layers: list[Any] = []

    def begin(self, layers: list[Any]) -> None:
        """Put the states that rows have into the layers of a cache, which the pass changes."""
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
        """Return the states after the last tokens of rows, ``[len(rows), *shape]`` each."""
        tensors = self._layout.tensors
        found = [getattr(self._layers[t.layer], t.name)[t.index] for t in tensors]
        if all(len(state) == len(rows) for state in found):
            return found
        index = torch.from_numpy(rows)
        return [state.index_select(0, index.to(state.device)) for state in found]


@final
class _AttendingStateLayer(LinearAttentionAndFullAttentionLayer):
    """One layer of a cache that holds keys and values in slots, and recurrent states as well."""

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
