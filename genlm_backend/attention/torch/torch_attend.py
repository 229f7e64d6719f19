"""Ways for new tokens to attend to cached ones: shared stretches once, copies of each row, none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention import reading as sharing
from genlm_backend.attention.attend import Attend
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.reading import Reading
from genlm_backend.attention.shared_pass import LastArrays
from genlm_backend.attention.torch.dispatch import TorchPass, attends_otherwise, dispatched_to
from genlm_backend.attention.torch.layer import Pair, SlotLayer, by_head, by_token, write_new
from genlm_backend.attention.torch.torch_row_states import cache_of
from genlm_backend.prefix import PADDING_SLOT, KVLayout, KVStore, LayerLayout, StateLayout


@final
class SharedAttend(Attend[dict[str, Any]]):
    """Attends to each stretch of cached tokens once for all rows that have it."""

    def __init__(self, store: KVStore, few_tokens: int | None = None) -> None:
        self._store = store
        self._few_tokens = sharing.FEW_TOKENS if few_tokens is None else few_tokens
        self._last: LastArrays | None = None

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading:
        return Reading.of(past, num_new, self._few_tokens)

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Have the model's layers call the attention of a pass."""
        reading = batch.reading or self.reading(batch.past, batch.num_new)
        shared = TorchPass(self._store, batch, reading, self._last)
        self._last = None
        layout = self._store.layout
        num_layers = len(layout.layers)
        new = [_NewTokens(self._store, i, batch, shared) for i in range(num_layers)]
        with dispatched_to(shared):
            cache = cache_of(new, layout.states, batch.states)
            yield {"cache": cache, "use_cache": True}
        if not shared.is_complete(num_layers):
            raise attends_otherwise(
                f"{shared.num_attended} of {num_layers} layers called the attention function that "
                "their config names"
            )
        self._last = shared.for_later()


@final
class _NewTokens(SlotLayer):
    """One layer: new keys and values go into their slots, and come out as they are."""

    def __init__(self, store: KVStore, layer: int, batch: PackedBatch, shared: TorchPass) -> None:
        super().__init__(shared.num_past)
        self._store, self._layer, self._batch, self._shared = store, layer, batch, shared

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Store and return ``[B, heads, Q, dim]``, keys and values."""
        new = write_new(self._store, self._layer, self._batch, key_states, value_states)
        self._shared.take(self._layer, *new)
        return new


@final
@dataclass(frozen=True, slots=True)
class Gathered:
    """The columns of one pass of ``B`` rows, ``P`` past and ``Q`` new ones."""

    slots: torch.Tensor  # [B, P + Q] int64
    mask: torch.Tensor  # [B, P + Q] int64
    num_past: int


def gather(batch: PackedBatch) -> Gathered:
    """Return the columns of a batch whose new tokens have slots; pure."""
    num_past = int(batch.num_past.max())
    new = np.full(batch.input_ids.numel(), PADDING_SLOT, np.int64)
    new[slice(None) if batch.new_columns is None else batch.new_columns] = batch.new_slots
    new = new.reshape(batch.input_ids.shape)
    slots = np.concatenate([batch.past.columns(num_past), new], 1)
    mask = np.arange(slots.shape[1]) >= num_past - batch.num_past[:, None]
    mask = torch.from_numpy(mask.astype(np.int64))
    return Gathered(torch.from_numpy(slots), mask, num_past)


@final
class GatherAttend(Attend[dict[str, Any]]):
    """Attends to copies of the keys and values in the slots of a store."""

    # The past is padded on the left and the new tokens on the right:
    #
    #     slots      0  0  7  8 | 9 10 11        a row with 2 past and 3 new tokens
    #                1  2  3  4 | 5  0  0        a row with 4 past and 1 new token
    #
    # So the distance of two columns of a row is that of their positions, from which causal and
    # sliding-window masks are made. Only the left padding is masked; causality hides the right one.
    def __init__(self, store: KVStore) -> None:
        self._store = store

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the mask of the left padding, and a cache of transformers over the slots."""
        layout = self._store.layout
        if not layout.layers:  # but states
            cache = cache_of((), layout.states, batch.states)
            yield {"cache": cache, "use_cache": True}
            return
        gathered = gather(batch)
        on: dict[torch.device, torch.Tensor] = {}  # moved once to each device that has a layer
        layers: list[SlotLayer] = []
        for number, layer in enumerate(layout.layers):
            if layer.device not in on:
                on[layer.device] = gathered.slots.to(layer.device)
            own = batch, on[layer.device], gathered.num_past
            layers.append(_GatheredLayer(self._store, number, *own))
        yield {
            "attention_mask": gathered.mask,
            "cache": cache_of(layers, layout.states, batch.states),
            "use_cache": True,
        }


@final
class _GatheredLayer(SlotLayer):
    """One layer: new keys and values go into their slots, past and new ones come out gathered."""

    def __init__(
        self, store: KVStore, layer: int, batch: PackedBatch, slots: torch.Tensor, num_past: int
    ) -> None:
        super().__init__(num_past)
        self._store, self._layer, self._batch, self._slots = store, layer, batch, slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Store ``[B, heads, Q, dim]`` and return ``[B, heads, P + Q, dim]``, keys and values."""
        write_new(self._store, self._layer, self._batch, key_states, value_states)
        return self._store.read_by_head(self._layer, self._slots)


@final
class WholeAttend(Attend[dict[str, Any]]):
    """Attends to the new tokens alone: there are none before them, and nothing is kept."""

    def __init__(self, layout: KVLayout | None = None) -> None:
        layers = () if layout is None else layout.layers
        self._rounding = [layer for layer in layers if layer.kept is not None]
        self._states = StateLayout() if layout is None else layout.states

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Yield a mask of the right padding, int64 ``[B, Q]``."""
        columns = np.arange(batch.input_ids.shape[1])
        mask = torch.from_numpy((columns < batch.num_new[:, None]).astype(np.int64))
        if not self._rounding:
            yield {"attention_mask": mask, "use_cache": False}
            return
        cache = cache_of(map(_RoundedLayer, self._rounding), self._states, None)
        yield {"attention_mask": mask, "cache": cache, "use_cache": True}


@final
class _RoundedLayer(SlotLayer):
    """One layer: new keys and values come out as they would be read from a store."""

    def __init__(self, layout: LayerLayout) -> None:
        super().__init__(0)
        self._codec = layout.codec()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Return ``[B, heads, Q, dim]``, keys and values."""
        codes = self._codec.encode(by_token(key_states, value_states, None))
        return by_head(self._codec.decode(codes), None, key_states, value_states)
