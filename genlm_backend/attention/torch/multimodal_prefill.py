"""MultimodalPrefillAttention: a pass over a context with pictures, from its first token on."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from genlm_backend.attention.forward_batch import AttentionBackend, ForwardBatch
from genlm_backend.attention.torch.torch_cache import (
    Pair,
    SlotLayer,
    as_read,
    by_token,
    transformers_cache,
)
from genlm_backend.multimodal.pictures import Pictures
from genlm_backend.prefix.kv_pool import KVLayout, KVPool


@final
class MultimodalPrefillAttention(AttentionBackend[dict[str, Any]]):
    """Attention of a pass over one context with pictures, and of a second pass with text alone."""

    def __init__(
        self,
        pictures: Pictures,
        layout: KVLayout,
        pool: KVPool | None = None,
        slots: Sequence[int] = (),
        stop: int = 0,
        goes_on: bool = False,
    ) -> None:
        self._pictures = pictures

        def take(number: int, keys: Tensor, values: Tensor) -> Pair:
            """Write the keys and values that have slots; return all, as a pool would read them."""
            if pool is not None and slots:
                rows = by_token(keys, values, None)
                places = torch.tensor(slots, dtype=torch.int64, device=rows.device)
                pool.write(number, places, rows[stop - len(slots) : stop])
            layer = layout.layers[number]
            return (keys, values) if layer.kept is None else as_read(layer.codec(), keys, values)

        layers = [_OpeningLayer(0, partial(take, i)) for i in range(len(layout.layers))]
        is_own = layers or layout.states or not goes_on
        self._cache = transformers_cache(layers, layout.states, None) if is_own else DynamicCache()
        self._is_used = bool(layers or goes_on)
        self._is_first = True

    @contextlib.contextmanager
    def forward_context(self, batch: ForwardBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the cache, if one is used, and for the first pass its pictures and position ids."""
        if not self._is_first:
            yield {"cache": self._cache, "use_cache": True}
            return
        self._is_first = False
        num_tokens = batch.input_ids.shape[1]
        dtype = next(model.parameters()).dtype
        taken = inspect.signature(model.forward).parameters
        given: dict[str, Any] = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in self._pictures.inputs_for(num_tokens).items()
            if name in taken
        }
        positions, _ = positions_of(model, batch.input_ids, self._pictures)
        if positions is not None:
            given["position_ids"] = positions
        if not self._is_used:
            yield {**given, "use_cache": False}
            return
        yield {**given, "cache": self._cache, "use_cache": True}


@final
class _OpeningLayer(SlotLayer):
    """A cache layer that keeps the first pass's keys and values for the second pass."""

    _past: Pair | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Return all keys and values so far, those of past passes first: ``[1, heads, n, dim]``."""
        new = super().update(key_states, value_states)
        if self._past is not None:
            first, second = (torch.cat(pair, -2) for pair in zip(self._past, new, strict=True))
            new = first, second
        self._past, self.max_prefix_len = new, new[0].shape[-2]
        return new


@torch.inference_mode()
def positions_of(model: Any, input_ids: Tensor, pictures: Pictures) -> tuple[Tensor | None, int]:
    """Return a context's position ids (``None``: 0, 1, …) and the shift of all later positions."""
    # Models with multidimensional positions (Qwen's) compute them from picture shapes.
    count = next(filter(None, (getattr(m, "get_rope_index", None) for m in model.modules())), None)
    if count is None:
        return None, 0
    taken = inspect.signature(count).parameters
    inputs = pictures.inputs_for(input_ids.shape[1])
    given = {name: value for name, value in inputs.items() if name in taken}
    positions, shifts = count(input_ids=input_ids, **given)
    return positions, int(shifts.reshape(-1)[0])
