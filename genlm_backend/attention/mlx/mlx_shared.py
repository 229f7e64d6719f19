"""MlxSharedAttend: cached stretches that several rows share are read once for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import mlx.core as mx
import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.mlx.mlx_attend import Caches, MlxSlotLayer, keep_new, offset_of
from genlm_backend.attention.mlx.mlx_dispatch import Dispatch, attends_otherwise
from genlm_backend.attention.mlx.mlx_gathered import MlxGatherAttend
from genlm_backend.attention.mlx.mlx_operators import MLX
from genlm_backend.attention.mlx.mlx_row_states import caches_of
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.reading import FEW_TOKENS, Reading
from genlm_backend.attention.shared_pass import LastArrays, SharedPass, new_positions
from genlm_backend.prefix.mlx_store import MlxStore


@final
class MlxSharedAttend(Attend[Caches]):
    """Attends to each stretch of cached tokens once for all rows that have it.

    Where a pass has no stretch that is worth it, each row's past is copied, and MLX's own attention
    takes all of it at once.
    """

    def __init__(
        self, store: MlxStore, few_tokens: int = FEW_TOKENS, makes_arrays: bool = False
    ) -> None:
        self._store, self._few_tokens, self._makes_arrays = store, few_tokens, makes_arrays
        self._gathered = MlxGatherAttend(store)
        self._dispatch: tuple[Any, Dispatch] | None = None
        self._last: LastArrays | None = None

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading | None:
        """Return the division of what several rows have cached into parts and a rest."""
        return Reading.of(past, num_new, self._few_tokens) if len(num_new) > 1 else None

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[Caches]:
        """Yield layers that attend by themselves, and have the model's layers ask them."""
        reading = batch.reading or self.reading(batch.past, batch.num_new)
        last, self._last = self._last, None
        if reading is None or not reading.parts:
            with self._gathered.attending(batch, model) as layers:
                yield layers
            return
        if self._dispatch is None or self._dispatch[0] is not model:
            self._dispatch = model, Dispatch(model)
        shared = MlxPass(self._store, batch, reading, last, self._makes_arrays)
        offset = offset_of(batch)
        own = [_SharedLayer(i, offset, shared) for i in range(len(self._store.shapes))]
        states: Any = batch.states
        with self._dispatch[1].in_place():
            yield caches_of(model, own, states)
        if not shared.is_complete(len(own)):
            raise attends_otherwise("not every layer has called mlx-lm's attention function")
        self._last = shared.for_later()

    def keep(self, batch: PackedBatch, given: Caches) -> None:
        """Write keys and values of the new tokens into the slots that the batch names."""
        keep_new(self._store, batch, given)


@final
class MlxPass(SharedPass[mx.array]):
    """The attention of one forward pass, as layers of a model of mlx-lm ask it."""

    operators = MLX
    attends_otherwise = staticmethod(attends_otherwise)

    def __init__(
        self,
        store: MlxStore,
        batch: PackedBatch,
        reading: Reading,
        last: LastArrays | None,
        makes_arrays: bool = False,
    ) -> None:
        super().__init__(store, batch, reading, last)
        self._makes_arrays = makes_arrays
        self._given: dict[int | None, mx.array] = {}

    def mask(self, num_new: int, window: int | None, is_array: bool) -> Any:
        """Return the mask over all positions: an array, or a word for it."""
        length = self.num_past + num_new
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


@final
class _SharedLayer(MlxSlotLayer):
    """One layer: new keys and values come out as they are, and it attends by itself."""

    def __init__(self, number: int, offset: int | mx.array, shared: MlxPass) -> None:
        super().__init__(number, offset)
        self._shared = shared

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        return self._shared.mask(N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the new tokens' keys and values, ``[B, heads, Q, dim]``, as they are."""
        if self.new is not None:
            raise attends_otherwise("a layer has more than one set of keys and values")
        self._shared.take(self.number, keys, values)
        self.new = keys, values
        return keys, values

    def attended(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: Any,
    ) -> mx.array:
        """Return the outputs of attention: ``[B, heads, Q, value_dim]``."""
        given = None if isinstance(mask, str) and mask == "causal" else mask
        found = self._shared.attend(queries, keys, values, given, scale, sinks=sinks)
        return found.astype(queries.dtype)
