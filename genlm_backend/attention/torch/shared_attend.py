"""SharedAttend: what several rows have cached is read once for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from genlm_backend.attention import reading as sharing
from genlm_backend.attention.attend import Attend
from genlm_backend.attention.indices import new_positions
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.reading import Reading
from genlm_backend.attention.shared_pass import LastStep, SharedPass
from genlm_backend.attention.torch.dispatch import Attention, attends_otherwise, dispatched_to
from genlm_backend.attention.torch.layer import NewSlots, Pair, SlotLayer
from genlm_backend.attention.torch.torch_operators import TORCH
from genlm_backend.attention.torch.torch_row_states import cache_of
from genlm_backend.prefix import KVStore

_HARMLESS: Final = frozenset(
    {
        "dropout",  # which is none in a model that is not being trained
        "sliding_window",  # which the mask says too
        "cache_position",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Options of attention functions that change nothing."""


@final
class SharedAttend(Attend[dict[str, Any]]):
    """Attends to each stretch of cached tokens once for all rows that have it.

    Args:
        store: Where the keys and values are.
        few_tokens: Cached tokens, counted for each row, that are not worth a product; ``None``
            for what has been measured.
        wider: Number of columns more than the longest past of a pass has.
    """

    def __init__(self, store: KVStore, few_tokens: int | None = None, wider: int = 0) -> None:
        self._store, self._wider = store, wider
        self._few_tokens = sharing.FEW_TOKENS if few_tokens is None else few_tokens
        self._last: LastStep | None = None

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading:
        """Return the division of what is cached into parts and a rest."""
        return Reading.of(past, num_new, self._few_tokens)

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Have the model's layers call the attention of a pass.

        Raises:
            ModelStateError: (``RuntimeError``) If some layer has not called it.
        """
        reading = batch.reading or self.reading(batch.past, batch.num_new)
        shared = SharedPass(TORCH, self._store, batch, reading, self._last, attends_otherwise)
        self._last = None
        attention = _SharedAttention(self._store, batch, shared, self._wider)
        with dispatched_to(attention):
            yield {"past_key_values": attention.cache(), "use_cache": True}
        num_layers = len(self._store.layout.layers)
        if not shared.is_complete(num_layers):
            raise attends_otherwise(
                f"{shared.num_attended} of {num_layers} layers called the attention function that "
                "their config names"
            )
        self._last = shared.for_later()


@final
class _SharedAttention(Attention):
    """A shared pass as the layers of a model of transformers call it."""

    def __init__(
        self, store: KVStore, batch: PackedBatch, shared: SharedPass[torch.Tensor], wider: int
    ) -> None:
        self._store, self._batch, self._shared = store, batch, shared
        self._num_past = wider + int(batch.num_past.max())
        self._new_slots = NewSlots(store, batch)

    def cache(self) -> Cache:
        """Return the cache of transformers that takes new keys and values."""
        layout = self._store.layout
        layers = [_NewTokens(self, i, self._num_past) for i in range(len(layout.layers))]
        return cache_of(layers, layout.states, self._batch.states)

    def keep(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Store new keys and values of a layer, ``[B, key_heads, Q, dim]``; return what is kept."""
        new = self._new_slots.write(layer, keys, values)
        self._shared.keep(layer, *new)
        return new

    def mask(
        self, allows: Callable[..., torch.Tensor], is_causal: bool, window: int | None
    ) -> torch.Tensor | None:
        """Return bool ``[B, 1, Q, L]`` over all positions, or ``None`` where all before count."""
        num_rows, num_new = self._batch.input_ids.shape
        length = self._num_past + num_new
        if is_causal or (window is not None and window >= length):
            return None
        allowed = allows(
            torch.arange(num_rows, dtype=torch.int64)[:, None, None, None],
            torch.zeros(1, 1, 1, 1, dtype=torch.int64),
            new_positions(self._batch)[:, None, :, None],
            torch.arange(length, dtype=torch.int64)[None, None, None, :],
        ).expand(num_rows, 1, num_new, length)
        self._shared.allow(allowed, allowed)
        return allowed

    def attended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend to the parts and to the rest, and merge."""
        unknown = {name for name, value in options.items() if value is not None} - _HARMLESS
        if unknown or is_causal is False:
            raise attends_otherwise(f"with {sorted(unknown) or 'is_causal=False'}")
        scale: float = query.shape[-1] ** -0.5 if scaling is None else scaling
        found = self._shared.attended(query, keys, values, mask, scale, softcap, s_aux)
        return found.transpose(1, 2).contiguous()


@final
class _NewTokens(SlotLayer):
    """One layer: new keys and values go into their slots, and come out as they are."""

    def __init__(self, attention: _SharedAttention, layer: int, num_past: int) -> None:
        super().__init__(num_past)
        self._attention, self._layer = attention, layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        return self._attention.keep(self._layer, key_states, value_states)
