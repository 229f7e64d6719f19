"""MlxSharedAttend: what several rows have cached is read once for all of them.

The queries of all rows that share a stretch of tokens go to it in one product, those of a row go
to the rest of its past and to its new tokens in another, and the two are merged by the logarithms
of their sums (Hydragen: Juravsky et al., 2024, arXiv:2402.05099). What is read together is decided
as for models of transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, final

import mlx.core as mx
import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.indices import PassMasks, new_positions
from genlm_backend.attention.mlx.mlx_attend import MlxAttend, MlxSlotLayer, keep_new
from genlm_backend.attention.mlx.mlx_block import MlxAttended, attend
from genlm_backend.attention.mlx.mlx_dispatch import Dispatch, attends_otherwise
from genlm_backend.attention.mlx.mlx_gathered import MlxGatherAttend
from genlm_backend.attention.mlx.mlx_row_states import caches_of
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.reading import FEW_TOKENS, Part, Reading
from genlm_backend.prefix.mlx_store import MlxStore

_CPU: Final = torch.device("cpu")


@final
class MlxSharedAttend(MlxAttend):
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

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading | None:
        """Return the division of what several rows have cached into parts and a rest."""
        return Reading.of(past, num_new, self._few_tokens) if len(num_new) > 1 else None

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[list[Any] | None]:
        """Yield layers that attend by themselves, and have the model's layers ask them.

        Raises:
            ModelStateError: (``RuntimeError``) If some layer has not asked.
        """
        reading = batch.reading or self.reading(batch.past, batch.num_new)
        if reading is None or not reading.parts:
            with self._gathered.attending(batch, model) as layers:
                yield layers
            return
        if self._dispatch is None or self._dispatch[0] is not model:
            self._dispatch = model, Dispatch(model)
        shared = _MlxSharedAttention(batch, reading, self._makes_arrays)
        num_layers = len(self._store.shapes)
        own: list[Any] = [_SharedLayer(self._store, i, shared) for i in range(num_layers)]
        states: Any = batch.states
        with self._dispatch[1].in_place():
            yield caches_of(model, own, states)
        if not all(layer.is_done for layer in own):
            raise attends_otherwise("not every layer has called mlx-lm's attention function")

    def keep(self, batch: PackedBatch, layers: list[Any] | None) -> None:
        """Write keys and values of the new tokens into the slots that the batch names."""
        keep_new(self._store, batch, layers)


class _Masks(NamedTuple):
    """``PassMasks`` in arrays of MLX."""

    rest: mx.array | None
    parts: tuple[mx.array | None, ...]
    is_read: tuple[bool, ...]


@final
class _MlxSharedAttention:
    """What the layers of one forward pass of ``B`` rows have in common.

    Args:
        batch: The new tokens.
        reading: How what is cached is read.
        makes_arrays: Whether windows get masks, as for ``MlxSharedAttend``.

    Attributes:
        parts: What is read together.
        rest: Slots of what each row reads for itself, ``[B, P]``; ``None`` for nothing.
        offset: Number of tokens before the new ones: ``[B]``, or one number for all.
    """

    def __init__(self, batch: PackedBatch, reading: Reading, makes_arrays: bool) -> None:
        self._batch, self._reading, self._makes_arrays = batch, reading, makes_arrays
        self.parts = [_PartIndices(part, batch.num_rows) for part in reading.parts]
        rest = reading.rest.slots
        self.rest = mx.array(rest.astype(np.int32)) if rest.size else None
        lengths = batch.num_past.astype(np.int32)
        self._longest = int(lengths.max())
        is_even = bool((lengths == self._longest).all())
        self.offset: int | mx.array = self._longest if is_even else mx.array(lengths)
        self._made: dict[tuple[int | None, bool], Any] = {}
        self._windows: dict[int, int | None] = {}  # of the arrays that have been made, by identity
        self._masks: dict[tuple[int | None, int], _Masks] = {}

    def mask(self, num_new: int, window: int | None, is_array: bool) -> Any:
        """Return what stands for who sees which: an array over all positions, or a word for it.

        Args:
            num_new: ``Q``.
            window: Number of tokens that one token sees, itself included; ``None`` for all.
            is_array: Whether an array is wanted where ``"causal"`` would do.
        """
        length = self._longest + num_new
        is_array = is_array or (window is not None and self._makes_arrays)
        if window is not None and window >= length and not self._makes_arrays:
            window = None
        if window is None and not is_array:
            return None if num_new == 1 else "causal"
        if (window, is_array) not in self._made:
            made = mx.array(self._allowed(window).numpy())
            self._made[window, is_array] = made
            self._windows[id(made)] = window
        return self._made[window, is_array]

    def _allowed(self, window: int | None) -> torch.Tensor:
        """Return bool ``[B, 1, Q, L]`` over all positions."""
        new = new_positions(self._batch)
        distance = new[:, :, None] - torch.arange(self._longest + new.shape[1], dtype=torch.int64)
        allowed = distance >= 0
        return (allowed if window is None else allowed & (distance < window))[:, None]

    def masks_of(self, mask: Any, group_size: int) -> _Masks:
        """Return what is added to the scores of a layer.

        Args:
            mask: What the layer was given by ``mask``.
            group_size: Number of heads that share a head of keys.

        Raises:
            ModelStateError: If it has another mask.
        """
        window = None
        if mask is not None and not (isinstance(mask, str) and mask == "causal"):
            if id(mask) not in self._windows:
                raise attends_otherwise("with a mask that is made in another way")
            window = self._windows[id(mask)]
        key = window, group_size
        if key not in self._masks:
            allowed = None if window is None else self._allowed(window)
            made = PassMasks.of(allowed, self._batch, self._reading, group_size, _CPU)
            parts = tuple(map(_array, made.parts))
            self._masks[key] = _Masks(_array(made.rest), parts, made.is_read)
        return self._masks[key]


def _array(tensor: torch.Tensor | None) -> mx.array | None:
    return None if tensor is None else mx.array(tensor.numpy())


@final
class _PartIndices:
    """Where the keys and values of a part are, and who attends to them.

    Args:
        part: The part.
        num_rows: Number of rows of the pass.

    Attributes:
        rows: Rows that attend to it; ``None`` for all.
        slots: Its slots: ``[n]``, or a slice where they follow one another.
    """

    def __init__(self, part: Part, num_rows: int) -> None:
        is_everybody = len(part.rows) == num_rows
        self.rows = None if is_everybody else mx.array(part.rows.astype(np.int32))
        first, last = int(part.slots[0]), int(part.slots[-1])
        is_stretch = part.is_consecutive
        self.slots = slice(first, last + 1) if is_stretch else mx.array(part.slots.astype(np.int32))


@final
class _SharedLayer(MlxSlotLayer):
    """One layer: new keys and values come out as they are, and it attends by itself."""

    def __init__(self, store: MlxStore, number: int, shared: _MlxSharedAttention) -> None:
        super().__init__(store, number)
        self._shared = shared
        self.is_done = False

    @property
    def offset(self) -> int | mx.array:
        """Position of the first new token: one number, or ``[B]``."""
        return self._shared.offset

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """Return what stands for who sees which; the names are those of mlx-lm's caches."""
        return self._shared.mask(N, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the new tokens' keys and values, ``[B, heads, Q, dim]``, as they are."""
        if self.new is not None:
            raise attends_otherwise("a layer has more than one set of keys and values")
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
        if self.new is None or self.new[0] is not keys or self.new[1] is not values or self.is_done:
            raise attends_otherwise("to keys or values that are others than the kept ones")
        self.is_done = True
        shared, num_groups = self._shared, keys.shape[1]
        num_rows, num_heads, num_new, dim = queries.shape
        group_size = num_heads // num_groups
        scaled = queries.astype(mx.float32) * scale
        packed = scaled.reshape(num_rows, num_groups, group_size * num_new, dim)
        masks = shared.masks_of(mask, group_size)
        total = attend(packed, *self._beside(keys, values), masks.rest)
        for part, own, is_read in zip(shared.parts, masks.parts, masks.is_read, strict=True):
            if is_read:
                asking = packed if part.rows is None else packed[part.rows]
                kept_keys, kept_values = self.store.read(self.number, part.slots)
                found = attend(_together(asking), kept_keys[None], kept_values[None], own)
                total.merge(_apart(found, len(asking)), part.rows)
        if sinks is not None:
            by_query = sinks.astype(mx.float32).reshape(num_groups, group_size)
            total.dampen(mx.repeat(by_query, num_new, 1))
        out = total.values.reshape(num_rows, num_heads, num_new, -1)
        return out.astype(queries.dtype)

    def _beside(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return new keys and values after each row's own past: ``[B, heads, P + Q, dim]``."""
        if self._shared.rest is None:
            return keys, values
        before = self.store.read_rows(self.number, self._shared.rest)
        pairs = zip(before, (keys, values), strict=True)
        joined = [mx.concatenate([*pair], 2) for pair in pairs]
        return joined[0], joined[1]


def _together(queries: mx.array) -> mx.array:
    """From ``[G, heads, M, dim]`` to ``[1, heads, G * M, dim]``."""
    num_rows, num_heads, num_queries, dim = queries.shape
    return queries.swapaxes(0, 1).reshape(1, num_heads, num_rows * num_queries, dim)


def _apart(found: MlxAttended, num_rows: int) -> MlxAttended:
    """Back from ``[1, heads, G * M, …]`` to ``[G, heads, M, …]``."""
    _, num_heads, _, dim = found.values.shape
    return MlxAttended(
        found.values.reshape(num_heads, num_rows, -1, dim).swapaxes(0, 1),
        found.logsumexp.reshape(num_heads, num_rows, -1).swapaxes(0, 1),
    )
