"""MlxGatherAttend: every row's past is copied out of its slots, side by side."""

from __future__ import annotations

import contextlib
from typing import Any, final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.mlx.mlx_attend import MlxAttend, MlxSlotLayer, as_caches, keep_new
from genlm_backend.attention.mlx.mlx_row_states import caches_of
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.prefix.mlx_store import MlxStore
from genlm_backend.prefix.slots import PADDING_SLOT


@final
class MlxGatherAttend(MlxAttend):
    """Attends to a copy of each row's past in the slots of a store, beside the new tokens.

    Args:
        store: The store.
        by_group: Whether masks are for scores of five dimensions, in which the heads that share a
            head of keys have one of their own.
    """

    def __init__(self, store: MlxStore, by_group: bool = False) -> None:
        self._store, self._by_group = store, by_group

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> None:
        """Return ``None``: each row's past is copied."""

    def attending(
        self, batch: PackedBatch, model: Any
    ) -> contextlib.AbstractContextManager[list[Any] | None]:
        """Yield a layer for each that the store has, and running states as they are."""
        own: list[_MlxGatheredLayer] = []
        if self._store.shapes:
            past = _Past(batch, self._by_group)
            own = [_MlxGatheredLayer(self._store, i, past) for i in range(len(self._store.shapes))]
        states: Any = batch.states
        return as_caches(caches_of(model, own, states))

    def keep(self, batch: PackedBatch, layers: list[Any] | None) -> None:
        """Write keys and values of the new tokens into the slots that the batch names."""
        keep_new(self._store, batch, layers)


@final
class _Past:
    """The tokens before the new ones of a batch: where they are, and who sees which.

    Args:
        batch: The batch, of ``B`` rows padded to ``Q`` new tokens on the right.
        by_group: Whether masks have five dimensions, as for ``MlxGatherAttend``.

    Attributes:
        slots: Slots of the tokens, padded on the right to ``P``: ``[B, P]``; ``None`` where no row
            has any.
        offset: Number of them in each row: ``[B]``, or one number for all.
    """

    def __init__(self, batch: PackedBatch, by_group: bool) -> None:
        self._lengths = batch.num_past.astype(np.int32)
        longest = int(self._lengths.max())
        slots = np.full((batch.num_rows, longest), PADDING_SLOT, np.int32)
        before = np.arange(longest)
        is_there = before < self._lengths[:, None]
        slots[is_there] = batch.past.columns(longest)[is_there[:, ::-1]]
        is_even = bool((self._lengths == longest).all())
        self._is_even, self._longest = is_even, longest
        self._axes = (1, 2) if by_group else (1,)
        self.slots = mx.array(slots) if longest else None
        self.offset: int | mx.array = longest if is_even else mx.array(self._lengths)
        self._masks: dict[tuple[int, int | None, bool], Any] = {}

    def mask(self, num_new: int, window: int | None, is_array: bool) -> Any:
        """Return who sees which: bool ``[B, 1, Q, P + Q]``, ``"causal"``, or ``None`` for all.

        Args:
            num_new: ``Q``.
            window: Number of tokens that one token sees, itself included; ``None`` for all.
            is_array: Whether an array is wanted where ``"causal"`` would do.
        """
        key = num_new, window, is_array
        if key not in self._masks:
            self._masks[key] = self._mask(*key)
        return self._masks[key]

    def _mask(self, num_new: int, window: int | None, is_array: bool) -> Any:
        is_within = window is None or self._longest + num_new <= window
        if self._is_even and is_within and not is_array:
            return None if num_new == 1 else "causal"
        new = np.arange(num_new)
        positions = self._lengths[:, None] + new  # [B, Q]
        before = np.broadcast_to(np.arange(self._longest), (len(positions), self._longest))
        keys = np.concatenate([before, positions], 1)  # [B, P + Q]
        is_there = np.ones_like(keys, bool)
        is_there[:, : self._longest] = before < self._lengths[:, None]
        distance = positions[:, :, None] - keys[:, None, :]
        seen = is_there[:, None, :] & (distance >= 0)
        if window is not None:
            seen &= distance < window
        visible: Any = np.expand_dims(seen, self._axes)
        return mx.array(visible)


@final
class _MlxGatheredLayer(MlxSlotLayer):
    """One layer: keys and values of the tokens before come out beside the new ones."""

    def __init__(self, store: MlxStore, number: int, past: _Past) -> None:
        super().__init__(store, number)
        self._past = past

    @property
    def offset(self) -> int | mx.array:
        """Position of the first new token: one number, or ``[B]``."""
        return self._past.offset

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """Return the attention mask; the names are those of mlx-lm's caches."""
        return self._past.mask(N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values of all tokens, those before first: ``[B, heads, P + Q, dim]``.

        Args:
            keys: Keys of the new tokens: ``[B, heads, Q, dim]``.
            values: Their values, as many.
        """
        self.new = keys, values
        if self._past.slots is None:
            return keys, values
        before = self.store.read_rows(self.number, self._past.slots)
        joined = [mx.concatenate([*pair], 2) for pair in zip(before, self.new, strict=True)]
        return joined[0], joined[1]
