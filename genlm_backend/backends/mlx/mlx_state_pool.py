"""MlxStatePool: recurrent states in arrays of MLX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import mlx.core as mx
import numpy as np

from genlm_backend.backends.mlx.mlx_kv_pool import make_room
from genlm_backend.errors import ModelStateError
from genlm_backend.prefix.nodes import Ints
from genlm_backend.prefix.state_cache import StateLayout

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
    """Recurrent states by number, as in ``StatePool``; number 0 stands for none."""

    def __init__(self, layout: StateLayout, num_states: int) -> None:
        self.layout, self.num_states = layout, num_states
        self._arrays: Any = layout.tensors
        # The arrays grow as states are first written, so that an unused budget takes no memory.
        rows = min(_FIRST_STATES, num_states + 1)
        self._kept = [mx.zeros((rows, *array.shape), array.dtype) for array in self._arrays]

    def read(self, numbers: Ints) -> list[mx.array]:
        """Return copies of states, ``[n, *shape]`` each, in the order of the layout."""
        index = _index(numbers)
        return [kept[index] for kept in self._kept]

    def write(self, numbers: Ints, states: Sequence[mx.array]) -> None:
        """Fill states with arrays as ``read`` returns them."""
        if len(numbers) == 0:
            return
        make_room(self._kept, int(np.max(numbers)) + 1, self.num_states + 1, axis=0)
        is_stretch = bool((np.diff(numbers) == 1).all())  # which is written at once
        first, last = int(numbers[0]), int(numbers[-1])
        places: Any = slice(first, last + 1) if is_stretch else _index(numbers)
        for i, (array, new) in enumerate(zip(self._arrays, states, strict=True)):
            if new.shape != (len(numbers), *array.shape):  # or it would be made to fit
                raise ModelStateError(
                    f"the recurrent state of some layer has the shape {new.shape[1:]}, and had "
                    f"{array.shape} behind other tokens"
                )
            self._kept[i][places] = new.astype(array.dtype)
        mx.eval(self._kept)

    def is_finite(self, numbers: Ints) -> bool:
        """Return whether nothing in these states is infinite or NaN."""
        return len(numbers) == 0 or all(
            bool(mx.isfinite(state).all().item()) for state in self.read(numbers)
        )


def _index(numbers: Ints) -> mx.array:
    return mx.array(np.asarray(numbers, np.int32))
