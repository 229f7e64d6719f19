"""MlxSharedAttend: what several rows have cached is read once for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import mlx.core as mx
import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.indices import new_positions
from genlm_backend.attention.mlx.mlx_attend import Caches, MlxSlotLayer, keep_new, offset_of
from genlm_backend.attention.mlx.mlx_dispatch import Dispatch, attends_otherwise
from genlm_backend.attention.mlx.mlx_gathered import MlxGatherAttend
from genlm_backend.attention.mlx.mlx_operators import MLX
from genlm_backend.attention.mlx.mlx_row_states import caches_of
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.reading import FEW_TOKENS, Reading
from genlm_backend.attention.shared_pass import LastStep, SharedPass
from genlm_backend.prefix.mlx_store import MlxStore


@final
class MlxSharedAttend(Attend[Caches]):
    """Attends to each stretch of cached tokens once for all rows that have it.

    Where a pass has no stretch that is worth it, each row's past is copied, and MLX's own attention
    takes all of it at once.

    Args:
        store: Where the keys and values are.
        few_tokens: Cached tokens, counted for each row, that are not worth a product.
        makes_arrays: Whether a layer with a window gets a mask where it would need none.
    """

    def __init__(
        self, store: MlxStore, few_tokens: int = FEW_TOKENS, makes_arrays: bool = False
    ) -> None:
        self._store, self._few_tokens, self._makes_arrays = store, few_tokens, makes_arrays
        self._gathered = MlxGatherAttend(store)
        self._dispatch: tuple[Any, Dispatch] | None = None
        self._last: LastStep | None = None

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading | None:
        """Return the division of what several rows have cached into parts and a rest."""
        return Reading.of(past, num_new, self._few_tokens) if len(num_new) > 1 else None

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[Caches]:
        """Yield layers that attend by themselves, and have the model's layers ask them.

        Raises:
            ModelStateError: (``RuntimeError``) If some layer has not asked.
        """
        reading = batch.reading or self.reading(batch.past, batch.num_new)
        last, self._last = self._last, None
        if reading is None or not reading.parts:
            with self._gathered.attending(batch, model) as layers:
                yield layers
            return
        if self._dispatch is None or self._dispatch[0] is not model:
            self._dispatch = model, Dispatch(model)
        shared = SharedPass(MLX, self._store, batch, reading, last, attends_otherwise)
        masks, offset = _Masks(batch, shared, self._makes_arrays), offset_of(batch)
        numbers = range(len(self._store.shapes))
        own = [_SharedLayer(number, shared, masks, offset) for number in numbers]
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
class _Masks:
    """What layers are given for masks: only who they are for counts, and ``SharedPass`` knows that.

    Args:
        batch: The new tokens.
        shared: The attention of the pass.
        makes_arrays: Whether windows get arrays, as for ``MlxSharedAttend``.
    """

    def __init__(
        self, batch: PackedBatch, shared: SharedPass[mx.array], makes_arrays: bool
    ) -> None:
        self._batch, self._shared, self._makes_arrays = batch, shared, makes_arrays
        self._made: dict[tuple[int | None, bool], mx.array] = {}

    def mask(self, num_new: int, window: int | None, is_array: bool) -> Any:
        """Return what stands for who sees which: an array over all positions, or a word for it.

        Args:
            num_new: ``Q``.
            window: Number of tokens that one token sees, itself included; ``None`` for all.
            is_array: Whether an array is wanted where ``"causal"`` would do.
        """
        length = int(self._batch.num_past.max()) + num_new
        is_array = is_array or (window is not None and self._makes_arrays)
        if window is not None and window >= length and not self._makes_arrays:
            window = None
        if window is None and not is_array:
            return None if num_new == 1 else "causal"
        if (window, is_array) not in self._made:
            new = new_positions(self._batch)
            distance = new[:, None, :, None] - torch.arange(length, dtype=torch.int64)
            allowed = (distance >= 0) & (distance < (window or length))
            made = self._made[window, is_array] = mx.array(allowed.numpy())
            self._shared.allow(made, None if window is None else allowed)
        return self._made[window, is_array]


@final
class _SharedLayer(MlxSlotLayer):
    """One layer: new keys and values come out as they are, and it attends by itself."""

    def __init__(
        self, number: int, shared: SharedPass[mx.array], masks: _Masks, offset: int | mx.array
    ) -> None:
        super().__init__(number, offset)
        self._shared, self._masks = shared, masks

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        return self._masks.mask(N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the new tokens' keys and values, ``[B, heads, Q, dim]``, as they are."""
        if self.new is not None:
            raise attends_otherwise("a layer has more than one set of keys and values")
        self._shared.keep(self.number, keys, values)
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
        """Attend to the parts and to the rest, and merge: ``[B, heads, Q, value_dim]``."""
        given = None if isinstance(mask, str) and mask == "causal" else mask
        found = self._shared.attended(queries, keys, values, given, scale, sinks=sinks)
        return found.astype(queries.dtype)
