"""Attention backends: cascade over shared prefixes, gather by row, and without a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genlm_backend.attention import cascade_plan as sharing
from genlm_backend.attention.cascade_plan import CachedPrefixes, CascadePlan
from genlm_backend.attention.forward_batch import AttentionBackend, AttentionFactory, ForwardBatch
from genlm_backend.attention.torch.torch_cache import (
    Pair,
    SlotLayer,
    as_read,
    transformers_cache,
    write_new,
)
from genlm_backend.backends.hf.attention_interface import (
    TorchCascadeRun,
    attends_otherwise,
    dispatched_to,
)
from genlm_backend.prefix.kv_pool import KVLayout, KVPool
from genlm_backend.prefix.slot_allocator import PADDING_SLOT
from genlm_backend.prefix.state_cache import StateLayout


@final
class CascadeAttention(AttentionBackend[dict[str, Any]]):
    """Attends once to each prefix that rows share; short prefixes are gathered for each row."""

    def __init__(self, pool: KVPool, few_tokens: int | None = None) -> None:
        self._pool = pool
        self._few_tokens = _few_tokens(pool.layout) if few_tokens is None else few_tokens

    def plan(self, past: CachedPrefixes, num_new: NDArray[np.int64]) -> CascadePlan:
        return CascadePlan.of(past, num_new, self._few_tokens)

    @contextlib.contextmanager
    def forward_context(self, batch: ForwardBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Route the model's layers to this pass's attention; yield the cache arguments."""
        plan = batch.plan or self.plan(batch.past, batch.num_new)
        shared = TorchCascadeRun(self._pool, batch, plan)

        def take(layer: int, keys: Tensor, values: Tensor) -> Pair:
            """Store new keys and values; return them as the pool's format decodes them."""
            return shared.take_kv(layer, *write_new(self._pool, layer, batch, keys, values))

        layout = self._pool.layout
        num_layers = len(layout.layers)
        layers = [SlotLayer(shared.max_prefix_len, partial(take, i)) for i in range(num_layers)]
        with dispatched_to(shared):
            yield {
                "cache": transformers_cache(layers, layout.states, batch.states),
                "use_cache": True,
            }
        if not shared.is_complete(num_layers):
            raise attends_otherwise(
                f"{shared.num_attended} of {num_layers} layers called the attention function "
                "named in their config"
            )


def _few_tokens(layout: KVLayout) -> int:
    """Return about how many tokens of a run, times its rows, make a separate product pay off."""
    if {layer.device.type for layer in layout.layers} != {"cpu"}:
        return sharing.FEW_TOKENS
    return max(sharing.FEW_TOKENS, sharing.FEW_BYTES * len(layout.layers) // layout.bytes_per_slot)


@final
class GatherAttention(AttentionBackend[dict[str, Any]]):
    """Attends to keys and values that are copied out of a pool for each row."""

    # The past is left-padded to ``P`` columns, and the new tokens are right-padded to ``Q``:
    #
    #     slots      0  0  7  8 | 9 10 11        a row with 2 past and 3 new tokens
    #                1  2  3  4 | 5  0  0        a row with 4 past and 1 new token
    #
    # So the distance of two columns in a row is the distance of their positions, which causal and
    # sliding-window masks need. Only left padding is masked; causality hides right padding.
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    @contextlib.contextmanager
    def forward_context(self, batch: ForwardBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the mask of the left padding (if layers attend), and a cache over the slots."""
        layout = self._pool.layout
        if not layout.layers:  # recurrent states only
            cache = transformers_cache((), layout.states, batch.states)
            yield {"cache": cache, "use_cache": True}
            return
        max_prefix_len = int(batch.prefix_lens.max())
        new = np.full(batch.input_ids.numel(), PADDING_SLOT, np.int64)
        columns = slice(None) if batch.unpadded_index is None else batch.unpadded_index
        new[columns] = batch.slot_mapping
        both = batch.past.columns(max_prefix_len), new.reshape(batch.input_ids.shape)
        slots = torch.from_numpy(np.concatenate(both, 1))  # [B, P + Q]
        mask = np.arange(slots.shape[1]) >= max_prefix_len - batch.prefix_lens[:, None]
        # One copy of the slot numbers for each device that has a layer.
        on = {device: slots.to(device) for device in {layer.device for layer in layout.layers}}

        def take(layer: int, keys: Tensor, values: Tensor) -> Pair:
            """Store new keys and values; return past and new, ``[B, heads, P + Q, dim]`` each."""
            write_new(self._pool, layer, batch, keys, values)
            return self._pool.read_by_head(layer, on[layout.layers[layer].device])

        layers = [SlotLayer(max_prefix_len, partial(take, i)) for i in range(len(layout.layers))]
        cache = transformers_cache(layers, layout.states, batch.states)
        given = {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
        yield {**given, "cache": cache, "use_cache": True}


@final
class UncachedAttention(AttentionBackend[dict[str, Any]]):
    """Attends to the new tokens alone: no tokens precede them, and nothing is cached."""

    def __init__(self, layout: KVLayout | None = None) -> None:
        layers = () if layout is None else layout.layers
        self._rounding = [layer for layer in layers if layer.kept is not None]
        self._states = StateLayout() if layout is None else layout.states

    @contextlib.contextmanager
    def forward_context(self, batch: ForwardBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the padding mask, int64 ``[B, Q]``, and, if the format rounds, a rounding cache."""
        columns = np.arange(batch.input_ids.shape[1])
        mask = torch.from_numpy((columns < batch.num_new[:, None]).astype(np.int64))
        if not self._rounding:
            yield {"attention_mask": mask, "use_cache": False}
            return
        layers = [SlotLayer(0, partial(as_read, layer.codec())) for layer in self._rounding]
        cache = transformers_cache(layers, self._states, None)
        yield {"attention_mask": mask, "cache": cache, "use_cache": True}


ATTENTION_FACTORIES: Final = (
    AttentionFactory(CascadeAttention, lambda pool: CascadeAttention(pool, 4), uses_interface=True),
    AttentionFactory(GatherAttention, GatherAttention),
)
"""Attention backends over slots; a model gets the first whose rows match uncached rows."""
