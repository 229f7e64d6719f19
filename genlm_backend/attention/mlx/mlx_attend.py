"""MlxAttend: from slots to what a model of mlx-lm takes for its caches."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.mlx.mlx_row_states import leaves
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.reading import Reading
from genlm_backend.prefix.mlx_store import MlxStore


class MlxAttend(abc.ABC):
    """A way for the new tokens of a forward pass to attend to those before them."""

    @abc.abstractmethod
    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading | None:
        """Return how a pass reads what its rows have cached, made anew; see ``Attend.reading``."""

    @abc.abstractmethod
    def attending(
        self, batch: PackedBatch, model: Any
    ) -> contextlib.AbstractContextManager[list[Any] | None]:
        """Yield what the model takes for its caches, one for each, or ``None`` for none.

        Only while the context lasts does the model attend in this way.
        """

    @abc.abstractmethod
    def keep(self, batch: PackedBatch, layers: list[Any] | None) -> None:
        """Keep the new tokens' keys and values, once the pass has been evaluated."""


@final
@dataclass(frozen=True, slots=True)
class MlxWay:
    """A way to attend to keys and values in slots.

    Attributes:
        over: Makes it over a store.
        probing: Makes it so that contexts of a few tokens go through all of it.
    """

    over: Callable[[MlxStore], MlxAttend]
    probing: Callable[[MlxStore], MlxAttend]


class MlxSlotLayer(abc.ABC):
    """What a model takes for one of its caches, for one forward pass.

    Args:
        store: What has the keys and values of the tokens before.
        number: Number of the layer in it.
    """

    def __init__(self, store: MlxStore, number: int) -> None:
        self.store, self.number = store, number
        self.new: tuple[mx.array, mx.array] | None = None

    @property
    @abc.abstractmethod
    def offset(self) -> int | mx.array:
        """Position of the first new token: one number, or ``[B]``."""

    @abc.abstractmethod
    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """Return the attention mask; the names are those of mlx-lm's caches."""

    @abc.abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take new keys and values, ``[B, heads, Q, dim]``; return what is attended to."""

    def taken(self, columns: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return the new tokens' keys and values, ``[heads, n, dim]`` each, without the padding.

        Args:
            columns: The ones of the ``B * Q`` columns that are tokens; ``None`` for all.
        """
        assert self.new is not None, "the model has not used this cache"
        found = []
        for states in self.new:
            _, num_heads, _, dim = states.shape
            rows = states.transpose(1, 0, 2, 3).reshape(num_heads, -1, dim)
            found.append(rows if columns is None else rows[:, columns])
        return found[0], found[1]


def keep_new(store: MlxStore, batch: PackedBatch, layers: list[Any] | None) -> None:
    """Write what layers have taken into the slots that the batch names."""
    columns = None if batch.new_columns is None else mx.array(batch.new_columns.numpy())
    own = [layer for layer in leaves(layers or ()) if isinstance(layer, MlxSlotLayer)]
    new = [layer.taken(columns) for layer in own]
    mx.eval(new)
    store.write(batch.new_slots.numpy(), new)


@contextlib.contextmanager
def as_caches(layers: list[Any] | None) -> Iterator[list[Any] | None]:
    """Yield layers that need nothing but to be a model's caches."""
    yield layers
