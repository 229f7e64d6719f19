"""MlxKVPool: keys and values of slots in arrays of MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from genlm_backend.prefix.kv_pool import KVLayout

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
        # Heads come first, so that a stretch of slots is read in place.
        rows = min(_FIRST_SLOTS, self._num_rows)
        self._kept = [
            [mx.zeros((s.num_heads, rows, dim), s.dtype) for dim in (s.key_dim, s.value_dim)]
            for s in self.shapes
        ]

    def read_by_head(self, layer: int, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        """Return keys and values of rows of slots in one layer: ``[B, heads, n, dim]`` each."""
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
        """Return whether no key and no value of these slots is infinite or NaN."""
        places = mx.array(np.asarray(slots, np.int32))
        return all(
            bool(mx.isfinite(part[:, places]).all().item()) for kept in self._kept for part in kept
        )


def make_room(kept: list[mx.array], num_rows: int, most: int, axis: int) -> None:
    """Have arrays grow along an axis if they have fewer rows, one by one: little is there twice."""
    present = kept[0].shape[axis]
    if num_rows <= present:
        return
    for i in range(len(kept)):
        shape = list(kept[i].shape)
        shape[axis] = min(most, max(num_rows, 2 * present)) - present
        kept[i] = mx.concatenate([kept[i], mx.zeros(shape, kept[i].dtype)], axis)
        mx.eval(kept[i])
