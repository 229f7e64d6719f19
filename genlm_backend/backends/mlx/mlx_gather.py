"""MlxGatherAttention: copies each row's cached keys and values out of slots, padded on the left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from genlm_backend.attention.forward_batch import AttentionBackend, ForwardBatch
from genlm_backend.backends.mlx.mlx_batch_states import caches_of, leaves
from genlm_backend.backends.mlx.mlx_kv_pool import MlxKVPool

if TYPE_CHECKING:
    from genlm_backend.backends.mlx.mlx_cascade import MlxCascadeRun

Caches: TypeAlias = list[Any] | None
"""A model's caches or stand-ins for them, one per layer; ``None`` for no caches."""

MlxAttention: TypeAlias = AttentionBackend[Caches]
"""An attention backend of MLX: how new tokens attend to the tokens before them."""


@final
class MlxSlotLayer:
    """A stand-in for one of a model's caches, during one forward pass."""

    def __init__(
        self, pool: MlxKVPool, number: int, offset: int | mx.array, of_pass: _Past | MlxCascadeRun
    ) -> None:
        self.pool, self._number, self.offset, self.of_pass = pool, number, offset, of_pass
        self.new: tuple[mx.array, mx.array] | None = None

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """Return the attention mask; mlx-lm's caches dictate the parameter names."""
        return self.of_pass.mask(N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take new keys and values, ``[B, heads, Q, dim]``; return what new tokens attend to."""
        found = self.of_pass.take_kv(self._number, keys, values)
        self.new = keys, values
        return found

    def taken(self, columns: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return new keys and values, all or at ``columns``: ``[heads, num_tokens, dim]`` each."""
        assert self.new is not None, "the model has not used this cache"
        found = []
        for states in self.new:
            _, num_heads, _, dim = states.shape
            rows = states.transpose(1, 0, 2, 3).reshape(num_heads, -1, dim)
            found.append(rows if columns is None else rows[:, columns])
        return found[0], found[1]


def keep_new(batch: ForwardBatch, layers: Caches) -> None:
    """Write the keys and values that the layers took into the slots of ``slot_mapping``."""
    own = [layer for layer in leaves(layers or ()) if isinstance(layer, MlxSlotLayer)]
    if not own:
        return
    columns = None if batch.unpadded_index is None else mx.array(batch.unpadded_index.numpy())
    new = [layer.taken(columns) for layer in own]
    mx.eval(new)
    own[0].pool.write(batch.slot_mapping.numpy(), new)


def offset_of(batch: ForwardBatch) -> int | mx.array:
    """Return how many tokens precede each row's new ones: ``[B]``, or an int if all are equal."""
    lengths = batch.prefix_lens.astype(np.int32)
    return int(lengths[0]) if (lengths == lengths[0]).all() else mx.array(lengths)


@final
class MlxUncachedAttention(AttentionBackend[Caches]):
    """Attends to the new tokens alone, with fresh caches that are discarded afterwards."""

    @contextlib.contextmanager
    def forward_context(self, batch: ForwardBatch, model: Any) -> Iterator[Caches]:
        # The model gets caches because some layers read what other layers put into caches.
        yield make_prompt_cache(model)


@final
class MlxGatherAttention(AttentionBackend[Caches]):
    """Attends to copies of each row's cached tokens, and to the new tokens."""

    def __init__(self, pool: MlxKVPool, by_group: bool = False) -> None:
        self._pool, self._by_group = pool, by_group

    @contextlib.contextmanager
    def forward_context(self, batch: ForwardBatch, model: Any) -> Iterator[Caches]:
        own: list[Any] = []
        if self._pool.shapes:
            past, offset = _Past(self._pool, batch, self._by_group), offset_of(batch)
            numbers = range(len(self._pool.shapes))
            own = [MlxSlotLayer(self._pool, number, offset, past) for number in numbers]
        states: Any = batch.states
        yield caches_of(model, own, states)


@final
class _Past:
    """The cached tokens before a batch's new ones, padded to ``P`` per row: slots and masks."""

    def __init__(self, pool: MlxKVPool, batch: ForwardBatch, by_group: bool) -> None:
        self._pool = pool
        self._longest = int(batch.prefix_lens.max())
        self._num_padding = self._longest - batch.prefix_lens
        self._by_group = by_group
        slots = batch.past.columns(self._longest)
        self._slots = mx.array(slots.astype(np.int32)) if self._longest else None
        self._masks: dict[tuple[int, int | None, bool], Any] = {}

    def mask(self, num_new: int, window: int | None, is_array: bool) -> Any:
        """Return the mask: bool ``[B, 1, Q, P + Q]``, ``"causal"``, or ``None`` for no mask.

        With ``by_group``, an array has one more dimension of size 1, for groups of queries.
        """
        key = num_new, window, is_array
        if key in self._masks:
            return self._masks[key]
        num_columns = self._longest + num_new
        is_within = window is None or num_columns <= window
        if is_within and not is_array and not self._num_padding.any():
            return None if num_new == 1 else "causal"
        columns = np.arange(num_columns)
        distance = columns[self._longest :, None] - columns
        seen = (distance >= 0) & (distance < (window or num_columns))
        seen = seen & (columns >= self._num_padding[:, None])[:, None]  # [B, Q, P + Q]
        visible: Any = np.expand_dims(seen, (1, 2) if self._by_group else 1)
        self._masks[key] = mx.array(visible)
        return self._masks[key]

    def take_kv(self, number: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values of cached and new tokens: ``[B, heads, P + Q, dim]``."""
        if self._slots is None:
            return keys, values
        before = self._pool.read_by_head(number, self._slots)
        joined = [mx.concatenate([*pair], 2) for pair in zip(before, (keys, values), strict=True)]
        return joined[0], joined[1]
