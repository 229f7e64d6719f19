"""MlxCascadeAttention: reads a cached prefix once for all the rows that share it.

mlx-lm's model modules import ``scaled_dot_product_attention`` by name. In a pass whose rows share a
prefix, that name is bound to a replacement. For a cache without an ``MlxCascadeRun``, the
replacement calls mlx-lm's function.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, final

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models import base
from numpy.typing import NDArray

from genlm_backend.attention.cascade_plan import FEW_TOKENS, CachedPrefixes, CascadePlan
from genlm_backend.attention.cascade_run import CascadeRun, new_positions
from genlm_backend.attention.forward_batch import AttentionBackend, AttentionFactory, ForwardBatch
from genlm_backend.attention.softmax_attention import ArrayOps
from genlm_backend.backends.mlx.mlx_batch_states import caches_of
from genlm_backend.backends.mlx.mlx_gather import (
    Caches,
    MlxGatherAttention,
    MlxSlotLayer,
    offset_of,
)
from genlm_backend.backends.mlx.mlx_kv_pool import MlxKVPool
from genlm_backend.errors import ModelStateError


def _put(tensor: torch.Tensor, device: Any) -> mx.array:
    made = mx.array(tensor.numpy())
    return made.astype(mx.int32) if made.dtype == mx.int64 else made


def _products(query: mx.array, keys: mx.array, scaling: float) -> mx.array:
    return (query.astype(mx.float32) * scaling) @ keys.astype(mx.float32).swapaxes(2, 3)


MLX: Final[ArrayOps[mx.array]] = ArrayOps(
    lib=mx,
    put=_put,
    device_of=lambda array: None,  # all devices share one memory
    as_type_of=lambda array, other: array.astype(other.dtype),
    fill_=lambda array, mask, value: mx.where(mask, value, array),
    at_least_=mx.maximum,
    exp_=mx.exp,
    tanh_=mx.tanh,
    lerp=lambda first, second, share: first + share * (second - first),
    largest=lambda scores: scores.max(-1, keepdims=True),
    total=lambda weights: weights.sum(-1, keepdims=True),
    products=_products,
    means_=lambda weights, total, values: weights @ values.astype(mx.float32) / total,
    # MLX's own attention does not return the softmax sums that merging blocks needs.
    fused=lambda *_: None,
)
"""Operations of attention on MLX arrays; sums are in float32 for all dtypes of keys and values."""


_NAME: Final = "scaled_dot_product_attention"


def mlx_attends_otherwise(how: str) -> ModelStateError:
    """Return the error for a model whose attention has changed since the model was probed."""
    return ModelStateError(
        f"the model attends otherwise than when it was wrapped: {how}; if it has changed, wrap it "
        "again"
    )


@final
class Dispatch:
    """The Python modules that define a model's classes and import mlx-lm's attention function."""

    def __init__(self, model: Any) -> None:
        names = {
            kind.__module__ for _, part in model.named_modules() for kind in type(part).__mro__
        }
        found = [sys.modules.get(name) for name in sorted(names)]
        self._modules: list[Any] = [m for m in found if hasattr(m, _NAME) and m is not base]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the attention function in these modules within the block."""
        theirs = [getattr(module, _NAME) for module in self._modules]
        try:
            for module, function in zip(self._modules, theirs, strict=True):
                setattr(module, _NAME, _asking(function))
            yield
        finally:
            for module, function in zip(self._modules, theirs, strict=True):
                setattr(module, _NAME, function)


def _asking(theirs: Any) -> Any:
    """Return an attention function that calls the cache's ``MlxCascadeRun``, or else ``theirs``."""

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
    ) -> mx.array:
        run = getattr(cache, "of_pass", None)
        if not isinstance(run, MlxCascadeRun):
            return theirs(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        given = None if isinstance(mask, str) and mask == "causal" else mask
        return run.attend(queries, keys, values, given, scale, sinks=sinks).astype(queries.dtype)

    return scaled_dot_product_attention


@final
class MlxCascadeAttention(AttentionBackend[Caches]):
    """Attends to each shared prefix once; in a batch without one, to gathered copies."""

    def __init__(
        self, pool: MlxKVPool, few_tokens: int = FEW_TOKENS, makes_arrays: bool = False
    ) -> None:
        self._pool, self._few_tokens, self._makes_arrays = pool, few_tokens, makes_arrays
        self._gathered = MlxGatherAttention(pool)
        self._dispatch: tuple[Any, Dispatch] | None = None

    def plan(self, past: CachedPrefixes, num_new: NDArray[np.int64]) -> CascadePlan | None:
        return CascadePlan.of(past, num_new, self._few_tokens) if len(num_new) > 1 else None

    @contextlib.contextmanager
    def forward_context(self, batch: ForwardBatch, model: Any) -> Iterator[Caches]:
        """Yield caches for the pass; replace mlx-lm's attention if rows share a prefix."""
        plan = batch.plan or self.plan(batch.past, batch.num_new)
        if plan is None or not plan.prefixes:
            with self._gathered.forward_context(batch, model) as layers:
                yield layers
            return
        if self._dispatch is None or self._dispatch[0] is not model:
            self._dispatch = model, Dispatch(model)
        shared = MlxCascadeRun(self._pool, batch, plan, self._makes_arrays)
        offset = offset_of(batch)
        own = [MlxSlotLayer(self._pool, i, offset, shared) for i in range(len(self._pool.shapes))]
        states: Any = batch.states
        with self._dispatch[1].in_place():
            yield caches_of(model, own, states)
        if not shared.is_complete(len(own)):
            raise mlx_attends_otherwise("not every layer has called mlx-lm's attention function")


@final
class MlxCascadeRun(CascadeRun[mx.array]):
    """The cascade attention of one forward pass, called by an mlx-lm model's layers."""

    ops = MLX
    attends_otherwise = staticmethod(mlx_attends_otherwise)

    def __init__(
        self, pool: MlxKVPool, batch: ForwardBatch, plan: CascadePlan, makes_arrays: bool = False
    ) -> None:
        super().__init__(pool, batch, plan)
        self._makes_arrays = makes_arrays
        self._given: dict[int | None, mx.array] = {}
        self._numbers: set[int] = set()  # of layers whose keys and values have arrived

    def mask(self, num_new: int, window: int | None, is_array: bool) -> Any:
        """Return the mask over all positions: an array, ``"causal"``, or ``None`` for no mask."""
        length = self.max_prefix_len + num_new
        if window is not None and window >= length and not self._makes_arrays:
            window = None
        is_array = is_array or window is not None
        if not is_array:
            return None if num_new == 1 else "causal"
        if window not in self._given:
            distance = new_positions(self._batch)[:, None, :, None] - torch.arange(
                length, dtype=torch.int64
            )
            allowed = (distance >= 0) & (distance < (window or length))
            made = self._given[window] = mx.array(allowed.numpy())
            self._allowed[id(made)] = made, None if window is None else allowed
        return self._given[window]

    def take_kv(self, number: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take a layer's new keys and values, ``[B, heads, Q, dim]``; return them unchanged."""
        if number in self._numbers:
            raise mlx_attends_otherwise("a layer has more than one set of keys and values")
        self._numbers.add(number)
        return super().take_kv(number, keys, values)


GATHERED: Final = AttentionFactory(MlxGatherAttention, MlxGatherAttention)
_BY_GROUP: Final = partial(MlxGatherAttention, by_group=True)
MLX_ATTENTION_FACTORIES: Final = (
    AttentionFactory(
        MlxCascadeAttention, lambda pool: MlxCascadeAttention(pool, 0, True), uses_interface=True
    ),
    GATHERED,
    AttentionFactory(_BY_GROUP, _BY_GROUP),
)
"""Attention backends over slots; the first whose rows pass the probe is used."""
