"""MlxKVPool and MlxStatePool: keys and values of slots, and recurrent states, in MLX arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import ModelStateError
from genlm_backend.prefix.kv_pool import KVLayout
from genlm_backend.prefix.nodes import Ints
from genlm_backend.prefix.state_cache import StateLayout

_FIRST_SLOTS: Final = 1024


@final
@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token's keys and values in one layer."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: Any

    @property
    def bytes_per_slot(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.size


@final
class MlxKVPool:
    """Keys and values of every slot, in every layer."""

    layout = KVLayout()
    is_exact = True

    def __init__(self, shapes: Sequence[LayerShape], num_slots: int) -> None:
        self.shapes = tuple(shapes)
        self.bytes_per_slot = sum(shape.bytes_per_slot for shape in shapes)
        self._num_rows = num_slots + 1
        # The arrays grow as slots are first written, so that an unused budget takes no memory.
        # Heads come first, so that consecutive slots of a head are adjacent in memory.
        rows = min(_FIRST_SLOTS, self._num_rows)
        self._kept = [
            [mx.zeros((s.num_heads, rows, dim), s.dtype) for dim in (s.key_dim, s.value_dim)]
            for s in self.shapes
        ]

    def read_by_head(self, layer: int, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        """Return a layer's keys and values of slots ``[B, n]``: ``[B, heads, n, dim]`` each.

        A slice of ``n`` slots counts as one row.
        """
        kept = [of_slots[:, slots] for of_slots in self._kept[layer]]
        if isinstance(slots, slice):
            return kept[0][None], kept[1][None]
        return kept[0].swapaxes(0, 1), kept[1].swapaxes(0, 1)

    def write(self, slots: np.ndarray, new: Sequence[tuple[mx.array, mx.array]]) -> None:
        for kept in self._kept:
            make_room(kept, int(slots.max()) + 1, self._num_rows, axis=1)
        is_stretch = bool((np.diff(slots) == 1).all())
        places: Any = slice(int(slots[0]), int(slots[-1]) + 1) if is_stretch else mx.array(slots)
        for kept, rows in zip(self._kept, new, strict=True):
            for number, of_tokens in enumerate(rows):
                kept[number][:, places] = of_tokens
        mx.eval(self._kept)

    def is_finite(self, slots: Sequence[int] | NDArray[Any]) -> bool:
        """Return whether all keys and values of these slots are finite."""
        places = mx.array(np.asarray(slots, np.int32))
        return all(
            bool(mx.isfinite(part[:, places]).all().item()) for kept in self._kept for part in kept
        )


def make_room(kept: list[mx.array], num_rows: int, most: int, axis: int) -> None:
    """Grow arrays along an axis to at least ``num_rows``, one at a time to save memory."""
    present = kept[0].shape[axis]
    if num_rows <= present:
        return
    for i in range(len(kept)):
        shape = list(kept[i].shape)
        shape[axis] = min(most, max(num_rows, 2 * present)) - present
        kept[i] = mx.concatenate([kept[i], mx.zeros(shape, kept[i].dtype)], axis)
        mx.eval(kept[i])


_FIRST_STATES: Final = 16


@final
@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of the recurrent state after one token."""

    layer: int
    index: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


@final
class MlxStatePool:
    """Recurrent states by number, like ``StatePool``; number 0 means no state."""

    def __init__(self, layout: StateLayout, num_states: int) -> None:
        self.layout, self.num_states = layout, num_states
        self._arrays: Any = layout.tensors
        # The arrays grow as states are first written, so that an unused budget takes no memory.
        rows = min(_FIRST_STATES, num_states + 1)
        self._kept = [mx.zeros((rows, *array.shape), array.dtype) for array in self._arrays]

    def read(self, numbers: Ints) -> list[mx.array]:
        """Return copies of states, ``[len(numbers), *shape]`` each, in the order of the layout."""
        index = _index(numbers)
        return [kept[index] for kept in self._kept]

    def write(self, numbers: Ints, states: Sequence[mx.array]) -> None:
        """Store states, in the format of ``read``, under these numbers."""
        if len(numbers) == 0:
            return
        make_room(self._kept, int(np.max(numbers)) + 1, self.num_states + 1, axis=0)
        is_stretch = bool((np.diff(numbers) == 1).all())  # a slice is faster
        first, last = int(numbers[0]), int(numbers[-1])
        places: Any = slice(first, last + 1) if is_stretch else _index(numbers)
        for i, (array, new) in enumerate(zip(self._arrays, states, strict=True)):
            if new.shape != (len(numbers), *array.shape):  # MLX would broadcast it
                raise ModelStateError(
                    f"a layer's recurrent state has the shape {new.shape[1:]}, but had "
                    f"{array.shape} after other tokens"
                )
            self._kept[i][places] = new.astype(array.dtype)
        mx.eval(self._kept)

    def is_finite(self, numbers: Ints) -> bool:
        """Return whether all values of these states are finite."""
        return len(numbers) == 0 or all(
            bool(mx.isfinite(state).all().item()) for state in self.read(numbers)
        )


def _index(numbers: Ints) -> mx.array:
    return mx.array(np.asarray(numbers, np.int32))
