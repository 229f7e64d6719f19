"""SharedAttend: what several rows have cached is read once for all of them.

The queries of all rows that share a stretch of tokens go to it in one product, those of a row go
to the rest of its past and to its new tokens in another, and the two are merged by the logarithms
of their sums (Hydragen: Juravsky et al., 2024, arXiv:2402.05099)::

    rows 0 1 2 ──▶ ┌ shared: 4,096 tokens, read once ┐ ──▶ ┌ rest 0 ┬ new 0 ┐
                   └─────────────────────────────────┘     ├ rest 1 ┼ new 1 ┤
                                                           └ rest 2 ┴ new 2 ┘
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from genlm_backend.attention import reading as sharing
from genlm_backend.attention.attend import Attend
from genlm_backend.attention.indices import (
    Indices,
    PartIndices,
    PassMasks,
    new_positions,
)
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.reading import Reading
from genlm_backend.attention.torch.block import Attended, Block
from genlm_backend.attention.torch.dispatch import Attention, attends_otherwise, dispatched_to
from genlm_backend.attention.torch.layer import SlotLayer
from genlm_backend.attention.torch.torch_row_states import cache_of
from genlm_backend.prefix import KVStore

LONG_COPY: Final = 4096
"""Tokens of a part, about, whose keys and values are decoded at once where they are in codes."""

_HARMLESS: Final = frozenset(
    {
        "dropout",  # which is none in a model that is not being trained
        "sliding_window",  # which the mask says too
        "cache_position",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Options of attention functions that change nothing."""


@final
class SharedAttend(Attend):
    """Attends to each stretch of cached tokens once for all rows that have it.

    Args:
        store: Where the keys and values are.
        few_tokens: Cached tokens, counted for each row, that are not worth a product; ``None``
            for what has been measured.
        wider: Number of columns more than the longest past of a pass has.
    """

    def __init__(self, store: KVStore, few_tokens: int | None = None, wider: int = 0) -> None:
        self._store, self._wider = store, wider
        self._few_tokens = sharing.FEW_TOKENS if few_tokens is None else few_tokens
        self._last: _Last | None = None

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading:
        """Return the division of what is cached into parts and a rest."""
        return Reading.of(past, num_new, self._few_tokens)

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Have the model's layers call the attention of a pass.

        Raises:
            ModelStateError: (``RuntimeError``) If some layer has not called it.
        """
        reading = batch.reading or self.reading(batch.past, batch.num_new)
        tensors = _Tensors(batch, reading, self._last)
        self._last = None
        attention = _SharedAttention(self._store, batch, tensors, self._wider)
        with dispatched_to(attention):
            yield {"past_key_values": attention.cache(), "use_cache": True}
        attention.check_complete()
        self._last = tensors.for_later()


class _Last(NamedTuple):
    """Tensors of a decode step, of which those of the next one are made.

    Attributes:
        name: The name of its reading.
        indices: Its indices, by device.
        masks: Its masks where all before count, by what ``_Tensors`` knows them by.
    """

    name: object
    indices: dict[torch.device, Indices]
    masks: dict[tuple[object, ...], PassMasks]


@final
class _Tensors:
    """Indices and masks of one pass, by device; they are made when they are first asked for.

    A decode step's are made of the last one's on the device, if that is the one it goes on from.

    Args:
        batch: The new tokens.
        reading: How what is cached is read.
        last: Tensors of the last step; ``None`` for none.
    """

    def __init__(self, batch: PackedBatch, reading: Reading, last: _Last | None) -> None:
        self._batch, self._reading = batch, reading
        self._indices: dict[torch.device, Indices] = {}
        self._masks: dict[tuple[object, ...], PassMasks] = {}
        step = reading.step
        if step is None or last is None or last.name is not step.before:
            return
        for device, indices in last.indices.items():
            self._indices[device] = indices.stepped(batch, reading, step)
        for key, masks in last.masks.items():
            self._masks[key] = masks.stepped(reading, step)

    def for_later(self) -> _Last | None:
        """Return what the next step may go on from; ``None`` where this was none."""
        if self._batch.input_ids.shape[1] > 1:
            return None
        # Those of windows are functions of positions, which the next step has others of.
        masks = {key: masks for key, masks in self._masks.items() if key[0] is None}
        return _Last(self._reading.name, self._indices, masks)

    def indices(self, device: torch.device) -> Indices:
        """Return the indices on a device."""
        if device not in self._indices:
            self._indices[device] = Indices.of(self._batch, self._reading, device)
        return self._indices[device]

    def masks(self, mask: torch.Tensor | None, group_size: int, device: torch.device) -> PassMasks:
        """Return the masks of layers of one kind.

        Args:
            mask: What they were given by ``Attention.mask``.
            group_size: Number of heads that share a head of keys.
            device: Where the layers are.
        """
        key = (None if mask is None else id(mask), group_size, device)
        if key not in self._masks:
            given = self._batch, self._reading, group_size, device
            self._masks[key] = PassMasks.of(mask, *given)
        return self._masks[key]


@final
class _SharedAttention(Attention):
    """The attention of one forward pass."""

    def __init__(self, store: KVStore, batch: PackedBatch, tensors: _Tensors, wider: int) -> None:
        self._store, self._batch, self._tensors = store, batch, tensors
        self._num_past = wider + int(batch.num_past.max())
        self._allowed: dict[int, torch.Tensor] = {}  # what ``mask`` has returned, by identity
        # The layer whose new keys and values have come, and no query yet, and these.
        self._new: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._num_attended = 0

    def cache(self) -> Cache:
        """Return the cache of transformers that takes new keys and values."""
        num_layers = len(self._store.layout.layers)
        layers = [_NewTokens(self, i, self._num_past) for i in range(num_layers)]
        return cache_of(layers, self._store.layout.states, self._batch.states)

    def check_complete(self) -> None:
        """Raise a ``ModelStateError`` unless every layer has attended once."""
        num_layers = len(self._store.layout.layers)
        if self._new is not None or self._num_attended != num_layers:
            raise attends_otherwise(
                f"{self._num_attended} of {num_layers} layers called the attention function that "
                "their config names"
            )

    # ---------------------------------------------------------------- called by the model

    def keep(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values of a layer, ``[B, key_heads, Q, dim]``; return what is kept."""
        if self._new is not None:
            raise attends_otherwise("a layer has attended elsewhere")
        keys, values = self._on(layer).write(self._store, layer, keys, values)
        self._new = layer, keys, values
        return keys, values

    def mask(
        self, allows: Callable[..., torch.Tensor], is_causal: bool, window: int | None
    ) -> torch.Tensor | None:
        """Return bool ``[B, 1, Q, L]`` over all positions, or ``None`` where all before count."""
        num_rows, num_new = self._batch.input_ids.shape
        length = self._num_past + num_new
        if is_causal or (window is not None and window >= length):
            return None
        allowed = allows(
            torch.arange(num_rows, dtype=torch.int64)[:, None, None, None],
            torch.zeros(1, 1, 1, 1, dtype=torch.int64),
            new_positions(self._batch)[:, None, :, None],
            torch.arange(length, dtype=torch.int64)[None, None, None, :],
        ).expand(num_rows, 1, num_new, length)
        self._allowed[id(allowed)] = allowed
        return allowed

    def attended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend to the parts and to the rest, and merge."""
        unknown = {name for name, value in options.items() if value is not None} - _HARMLESS
        if unknown or is_causal is False:
            raise attends_otherwise(f"with {sorted(unknown) or 'is_causal=False'}")
        if self._new is None or self._new[1] is not keys or self._new[2] is not values:
            raise attends_otherwise("to keys or values that are others than the kept ones")
        if mask is not None and id(mask) not in self._allowed:
            raise attends_otherwise("with a mask that is made in another way")
        layer = self._new[0]
        self._new = None
        self._num_attended += 1

        num_rows, num_heads, num_new, dim = query.shape
        num_groups, group_size = keys.shape[1], num_heads // keys.shape[1]
        packed = query.reshape(num_rows, num_groups, group_size * num_new, dim)
        block = Block(dim**-0.5 if scaling is None else scaling, softcap)
        masks = self._tensors.masks(mask, group_size, query.device)
        indices = self._on(layer)
        if masks.is_causal and block.fused(packed, values) is not None:
            total = block.attend_causally(packed, keys, values, group_size)
        else:
            beside = indices.beside(self._store, layer, keys, values)
            total = block.attend(packed, *beside, masks.rest)
        for part, own, is_read in zip(indices.parts, masks.parts, masks.is_read, strict=True):
            if is_read:
                queries = packed if part.rows is None else packed[part.rows]
                found = self._in_part(block, _together(queries), layer, part, own, num_groups)
                total.merge(_apart(found, len(queries)), part.rows)
        if s_aux is not None:
            total.dampen(s_aux.float().view(num_groups, group_size).repeat_interleave(num_new, 1))
        out = total.values.view(num_rows, num_heads, num_new, -1)
        return out.transpose(1, 2).contiguous()

    def _in_part(
        self,
        block: Block,
        query: torch.Tensor,
        layer: int,
        part: PartIndices,
        mask: torch.Tensor | None,
        num_groups: int,
    ) -> Attended:
        """Attend to a part: at once where it is read in place, or else stretch by stretch."""
        attend = block.attend if mask is None else block.attend_if_any
        size = part.num_tokens
        num_stretches = 1 if self._store.is_exact else max(1, round(size / LONG_COPY))
        bounds = [i * size // num_stretches for i in range(num_stretches + 1)]
        total: Attended | None = None
        for start, stop in itertools.pairwise(bounds):
            kept = part.read(self._store, layer, num_groups, start, stop)
            own = mask if mask is None else mask[..., start:stop]
            found = attend(query, *kept, own)
            if total is None:
                total = found
            else:
                total.merge(found, None)
        assert total is not None
        return total

    def _on(self, layer: int) -> Indices:
        return self._tensors.indices(self._store.layout.layers[layer].device)


def _together(queries: torch.Tensor) -> torch.Tensor:
    """From ``[G, heads, M, dim]`` to ``[1, heads, G * M, dim]``."""
    num_rows, num_heads, num_queries, dim = queries.shape
    return queries.transpose(0, 1).reshape(1, num_heads, num_rows * num_queries, dim)


def _apart(found: Attended, num_rows: int) -> Attended:
    """Back from ``[1, heads, G * M, …]`` to ``[G, heads, M, …]``."""
    _, num_heads, _, dim = found.values.shape
    return Attended(
        found.values.view(num_heads, num_rows, -1, dim).transpose(0, 1),
        found.logsumexp.view(num_heads, num_rows, -1).transpose(0, 1),
    )


@final
class _NewTokens(SlotLayer):
    """One layer: new keys and values go into their slots, and come out as they are."""

    def __init__(self, attention: _SharedAttention, layer: int, num_past: int) -> None:
        super().__init__(num_past)
        self._attention, self._layer = attention, layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store and return ``[B, heads, Q, dim]``, keys and values."""
        return self._attention.keep(self._layer, key_states, value_states)
