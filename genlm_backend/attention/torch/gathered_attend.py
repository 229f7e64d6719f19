"""GatherAttend: every row's past copied out of its slots, side by side.

The past is padded on the **left** and the new tokens on the **right**::

    slots      0  0  7  8 | 9 10 11        a row with 2 past and 3 new tokens
               1  2  3  4 | 5  0  0        a row with 4 past and 1 new token
               └─ past ─┘   └ new ┘

so that within a row the distance between two columns is the distance between two positions,
which is what causal and sliding-window masks are made from. Only the left padding has to be
masked: the right padding comes after every real token of its row, where causality hides it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.torch.layer import Pair, SlotLayer, write_new
from genlm_backend.attention.torch.torch_row_states import cache_of
from genlm_backend.prefix import PADDING_SLOT, KVStore


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
