"""From slots to what a model of mlx-lm takes for its caches."""

from __future__ import annotations

import abc
from typing import Any, final

import mlx.core as mx
import numpy as np

from genlm_backend.cache.slots import PADDING_SLOT
from genlm_backend.llm.hf.packing import PackedBatch
from genlm_backend.llm.mlx.store import LayerShape, MlxStore


class MlxAttend(abc.ABC):
    """A way for the new tokens of a forward pass to attend to those before them."""

    @abc.abstractmethod
    def layers(self, batch: PackedBatch) -> list[Any] | None:
        """Return what the model takes for its caches, one for each, or ``None`` for none."""

    @abc.abstractmethod
    def keep(self, batch: PackedBatch, layers: list[Any] | None) -> None:
        """Keep the new tokens' keys and values, once the pass has been evaluated."""


@final
class WholeAttend(MlxAttend):
    """Attends to the new tokens alone: there are none before them, and nothing is kept."""

    def layers(self, batch: PackedBatch) -> None:
        """Return ``None``."""

    def keep(self, batch: PackedBatch, layers: list[Any] | None) -> None:
        """Do nothing."""


@final
class SlotAttend(MlxAttend):
    """Attends to the tokens before the new ones in the slots of a store.

    Args:
        store: The store.
    """

    def __init__(self, store: MlxStore) -> None:
        self._store = store

    def layers(self, batch: PackedBatch) -> list[Any]:
        """Return a layer for each that the store has."""
        past = Past(batch)
        return [SlotLayer(self._store, number, past) for number in range(len(self._store.shapes))]

    def keep(self, batch: PackedBatch, layers: list[Any] | None) -> None:
        """Write keys and values of the new tokens into the slots that the batch names."""
        columns = None if batch.new_columns is None else mx.array(batch.new_columns.numpy())
        new = [layer.taken(columns) for layer in layers or ()]
        mx.eval(new)
        self._store.write(batch.new_slots.numpy(), new)


@final
class Past:
    """The tokens before the new ones of a batch: where they are, and who sees which.

    Args:
        batch: The batch, of ``B`` rows padded to ``Q`` new tokens on the right.

    Attributes:
        slots: Slots of the tokens, padded on the right to ``P``: ``[B, P]``; ``None`` where no row
            has any.
        offset: Number of them in each row: ``[B]``, or one number for all.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self._lengths = np.array([span.num_past for span in batch.spans], np.int32)
        longest = int(self._lengths.max())
        slots = np.full((len(batch.spans), longest), PADDING_SLOT, np.int32)
        for row, span in zip(slots, batch.spans, strict=True):
            start = 0
            for run in span.past:
                row[start : start + run.num_tokens] = run.slots[: run.num_tokens]
                start += run.num_tokens
        is_even = bool((self._lengths == longest).all())
        self._is_even, self._longest = is_even, longest
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
        visible: Any = seen[:, None]
        return mx.array(visible)


@final
class SlotLayer:
    """What a model takes for one of its caches, for one forward pass.

    Args:
        store: What has the keys and values of the tokens before.
        number: Number of the layer in it.
        past: Which tokens those are.
    """

    def __init__(self, store: MlxStore, number: int, past: Past) -> None:
        self._store, self._number, self._past = store, number, past
        self._new: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int | mx.array:
        """Position of the first new token: one number, or ``[B]``."""
        return self._past.offset

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """Return who sees which; the names are those of mlx-lm's caches."""
        return self._past.mask(N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values of all tokens, those before first: ``[B, heads, P + Q, dim]``.

        Args:
            keys: Keys of the new tokens: ``[B, heads, Q, dim]``.
            values: Their values, as many.
        """
        self._new = keys, values
        if self._past.slots is None:
            return keys, values
        before = self._store.read(self._number, self._past.slots)
        joined = [mx.concatenate([*pair], 2) for pair in zip(before, self._new, strict=True)]
        return joined[0], joined[1]

    def taken(self, columns: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return the new tokens' keys and values, ``[n, heads, dim]`` each, without the padding.

        Args:
            columns: The ones of the ``B * Q`` columns that are tokens; ``None`` for all.
        """
        assert self._new is not None, "the model has not used this cache"
        found = []
        for states in self._new:
            _, num_heads, _, dim = states.shape
            rows = states.transpose(0, 2, 1, 3).reshape(-1, num_heads, dim)
            found.append(rows if columns is None else rows[columns])
        return found[0], found[1]


@final
class ShapeLayer:
    """A cache that only notes the shapes of keys and values that it is given."""

    offset = 0
    shape: LayerShape | None = None

    def make_mask(self, N: int, return_array: bool = False, **_: Any) -> Any:
        """Return the causal mask of a pass that has nothing before it."""
        return mx.array(np.tri(N, dtype=bool)) if return_array else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return them as they are."""
        if keys.shape[1] == values.shape[1] and self.shape is None:
            self.shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return keys, values
