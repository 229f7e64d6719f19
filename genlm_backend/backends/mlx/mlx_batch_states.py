"""The recurrent states of a pass's rows, and the mlx-lm caches that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from genlm_backend.attention.forward_batch import BatchStates
from genlm_backend.prefix.nodes import Ints
from genlm_backend.prefix.state_cache import StateLayout


def caches_of(model: Any, slot_layers: Iterable[Any], states: MlxBatchStates | None) -> list[Any]:
    slots = iter(slot_layers)
    caches = [_with(cache, slots) for cache in make_prompt_cache(model)]
    if states is not None:
        states.begin(caches)
    return caches


def _with(cache: Any, slots: Iterator[Any]) -> Any:
    """Return a layer's cache, in which the next of ``slots`` replace parts for keys and values."""
    if isinstance(cache, CacheList):
        return CacheList(*(_with(part, slots) for part in cache.caches))
    return cache if isinstance(cache, ArraysCache) else next(slots)


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """Yield a model's caches one by one, including those inside a layer's ``CacheList``."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def state_caches(caches: Iterable[Any]) -> list[ArraysCache]:
    return [cache for cache in leaves(caches) if isinstance(cache, ArraysCache)]


@final
class MlxBatchStates(BatchStates):
    """The recurrent states of one pass's rows, before and after it."""

    def __init__(self, layout: StateLayout, before: Sequence[mx.array] | None) -> None:
        self._layout, self._before = layout, before
        self._caches: list[ArraysCache] = []

    def begin(self, caches: Iterable[Any]) -> None:
        self._caches = state_caches(caches)
        if self._before is None:
            return
        for array, state in zip(self._layout.tensors, self._before, strict=True):
            self._caches[array.layer][array.index] = state
        self._before = None

    def behind(self, rows: Ints) -> list[mx.array]:
        found = [self._caches[array.layer][array.index] for array in self._layout.tensors]
        if all(len(state) == len(rows) for state in found):
            return found
        index = mx.array(rows.astype(np.int32))
        return [state[index] for state in found]
