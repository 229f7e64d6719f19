"""SharedAttend: cached stretches that several rows share are read once for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from genlm_backend.attention.torch.layer import Pair, SlotLayer, write_new
from genlm_backend.attention.torch.torch_row_states import cache_of
from genlm_backend.prefix import KVStore


@final
class SharedAttend(Attend[dict[str, Any]]):
    """Attends to each stretch of cached tokens once for all rows that have it."""

    def __init__(self, store: KVStore, few_tokens: int | None = None) -> None:
        self._store = store
        self._few_tokens = sharing.FEW_TOKENS if few_tokens is None else few_tokens
        self._last: LastArrays | None = None

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading:
        """Return the division of what is cached into parts and a rest."""
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
