"""Layers that a model of mlx-lm takes for its caches, over the slots of a store."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias, final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.mlx.mlx_row_states import leaves
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.prefix.mlx_store import MlxStore

Caches: TypeAlias = list[Any] | None
"""Stand-ins for a model's caches, one for each; ``None`` for none."""

MlxAttend: TypeAlias = Attend[Caches]
"""A way for the new tokens of a forward pass of MLX to attend to those before them."""


class MlxSlotLayer(abc.ABC):
    """A stand-in for one of a model's caches, for one forward pass."""

    def __init__(self, number: int, offset: int | mx.array) -> None:
        self.number, self.offset = number, offset
        self.new: tuple[mx.array, mx.array] | None = None

    @abc.abstractmethod
    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """Return the attention mask; the names are those of mlx-lm's caches."""

    @abc.abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take new keys and values, ``[B, heads, Q, dim]``; return what is attended to."""

    def taken(self, columns: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return the new tokens' keys and values, ``[heads, n, dim]`` each, without the padding."""
        assert self.new is not None, "the model has not used this cache"
        found = []
        for states in self.new:
            _, num_heads, _, dim = states.shape
            rows = states.transpose(1, 0, 2, 3).reshape(num_heads, -1, dim)
            found.append(rows if columns is None else rows[:, columns])
        return found[0], found[1]


def keep_new(store: MlxStore, batch: PackedBatch, layers: Caches) -> None:
    """Write the keys and values that layers have taken into the slots that the batch names."""
    columns = None if batch.new_columns is None else mx.array(batch.new_columns.numpy())
    own = [layer for layer in leaves(layers or ()) if isinstance(layer, MlxSlotLayer)]
    new = [layer.taken(columns) for layer in own]
    mx.eval(new)
    store.write(batch.new_slots.numpy(), new)


def offset_of(batch: PackedBatch) -> int | mx.array:
    """Return the number of tokens before the new ones: one number for all rows, or ``[B]``."""
    lengths = batch.num_past.astype(np.int32)
    return int(lengths[0]) if (lengths == lengths[0]).all() else mx.array(lengths)


@final
class MlxWholeAttend(Attend[Caches]):
    """Attends to the new tokens alone: there are none before them, and nothing is kept.

    The model has caches of its own, new ones: some layers read what others have put there.
    """

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[Caches]:
        """Yield the model's own caches, empty."""
        yield make_prompt_cache(model)
