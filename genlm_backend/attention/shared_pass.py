"""Attention of one forward pass in which what several rows have cached is read once for all.

The queries of all rows that share a stretch of tokens go to it in one product, those of a row go
to the rest of its past and to its new tokens in another, and the two are merged by the logarithms
of their sums (Hydragen: Juravsky et al., 2024, arXiv:2402.05099)::

    rows 0 1 2 ──▶ ┌ shared: 4,096 tokens, read once ┐ ──▶ ┌ rest 0 ┬ new 0 ┐
                   └─────────────────────────────────┘     ├ rest 1 ┼ new 1 ┤
                                                           └ rest 2 ┴ new 2 ┘
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, final

import torch

from genlm_backend.attention.block import Attended, Block, together
from genlm_backend.attention.indices import Indices, PartIndices, PassMasks, Stored
from genlm_backend.attention.operators import A, Operators
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.reading import Reading
from genlm_backend.errors import ModelStateError

LONG_COPY: Final = 4096
"""Tokens of a part, about, whose keys and values are decoded at once where they are in codes."""


class LastStep(NamedTuple):
    """Arrays of a decode step, of which those of the next one are made.

    Attributes:
        name: The name of its reading.
        indices: Its indices, by device.
        masks: Its masks where all before count, by what ``SharedPass`` knows them by.
    """

    name: object
    indices: dict[Any, Indices[Any]]
    masks: dict[tuple[object, ...], PassMasks[Any]]


@final
class SharedPass(Generic[A]):
    """The attention of the layers of one forward pass, one after another.

    Indices and masks are made when they are first asked for on a device; a decode step's are made
    of the last one's there, if that is the one it goes on from.

    Args:
        operators: The operators of the library.
        store: Where keys and values are.
        batch: The new tokens.
        reading: How what is cached is read.
        last: Arrays of the last step; ``None`` for none.
        otherwise: Makes the error of a model that attends in another way than this.

    Attributes:
        num_attended: Number of layers that have attended.
    """

    def __init__(
        self,
        operators: Operators[A],
        store: Stored[A],
        batch: PackedBatch,
        reading: Reading,
        last: LastStep | None,
        otherwise: Callable[[str], ModelStateError],
    ) -> None:
        self._operators, self._store = operators, store
        self._batch, self._reading, self._otherwise = batch, reading, otherwise
        self._indices: dict[Any, Indices[A]] = {}
        self._masks: dict[tuple[object, ...], PassMasks[A]] = {}
        # What layers have been given for a mask, by identity, and who it says may see what.
        self._allowed: dict[int, tuple[object, torch.Tensor | None]] = {}
        # The layer whose new keys and values have come, and no query yet, and these.
        self._new: tuple[int, A, A] | None = None
        self.num_attended = 0
        step = reading.step
        if step is not None and last is not None and last.name is step.before:
            for device, indices in last.indices.items():
                self._indices[device] = indices.stepped(reading, step)
            for key, masks in last.masks.items():
                self._masks[key] = masks.stepped(reading, step)

    def for_later(self) -> LastStep | None:
        """Return what the next step may go on from; ``None`` where this was none."""
        if self._batch.input_ids.shape[1] > 1:
            return None
        # Those of windows are functions of positions, which the next step has others of.
        masks = {key: masks for key, masks in self._masks.items() if key[0] is None}
        return LastStep(self._reading.name, self._indices, masks)

    def keep(self, layer: int, keys: A, values: A) -> None:
        """Take new keys and values of a layer, ``[B, key_heads, Q, dim]``, before its query."""
        if self._new is not None:
            raise self._otherwise("a layer has attended elsewhere")
        self._new = layer, keys, values

    def allow(self, given: object, allowed: torch.Tensor | None) -> None:
        """Note what layers are given for a mask.

        Args:
            given: What they are given.
            allowed: What it stands for: bool ``[B, 1, Q, L]`` over all positions; ``None`` where
                all before count.
        """
        self._allowed[id(given)] = given, allowed

    def is_complete(self, num_layers: int) -> bool:
        """Whether so many layers have attended, and none has yet to."""
        return self._new is None and self.num_attended == num_layers

    def attended(
        self,
        query: A,
        keys: A,
        values: A,
        given: object,
        scaling: float,
        softcap: float | None = None,
        sinks: A | None = None,
    ) -> A:
        """Attend to the parts and to the rest, and merge: ``[B, heads, Q, value_dim]``.

        Args:
            query: Queries of the new tokens: ``[B, heads, Q, dim]``.
            keys: What ``keep`` was given last.
            values: The same.
            given: What the layer was given for a mask; ``None`` where all before count.
            scaling: What products are multiplied by.
            softcap: Bound that scores approach; ``None`` for no bound.
            sinks: One more score for each head, which has no value: ``[heads]``; ``None`` for none.
        """
        if self._new is None or self._new[1] is not keys or self._new[2] is not values:
            raise self._otherwise("to keys or values that are others than the kept ones")
        if given is not None and id(given) not in self._allowed:
            raise self._otherwise("with a mask that is made in another way")
        layer, operators = self._new[0], self._operators
        self._new = None
        self.num_attended += 1

        num_rows, num_heads, num_new, dim = query.shape
        num_groups, group_size = keys.shape[1], num_heads // keys.shape[1]
        packed = query.reshape(num_rows, num_groups, group_size * num_new, dim)
        block = Block(operators, scaling, softcap)
        device = operators.device_of(query)
        indices, masks = self._indices_on(device), self._masks_of(given, group_size, device)
        total = block.attend_causally(packed, keys, values, group_size) if masks.is_causal else None
        if total is None:
            beside = indices.beside(self._store, layer, keys, values)
            total = block.attend(packed, *beside, masks.rest)
        for part, own, is_read in zip(indices.parts, masks.parts, masks.is_read, strict=True):
            if is_read:
                queries = packed if part.rows is None else packed[part.rows]
                shared = self._in_part(block, together(queries), layer, part, own)
                total.merge(shared.apart(len(queries)), part.rows)
        by_head = num_rows, num_heads, num_new
        found = total.values.reshape(*by_head, -1)
        if sinks is None:
            return found
        total = Attended(operators, found, total.logsumexp.reshape(*by_head))
        return total.dampened(sinks[:, None])

    def _in_part(
        self, block: Block[A], query: A, layer: int, part: PartIndices[A], mask: A | None
    ) -> Attended[A]:
        """Attend to a part: at once where it is read in place, or else stretch by stretch."""
        attend = block.attend if mask is None else block.attend_if_any
        size = part.num_tokens
        num_stretches = 1 if self._store.is_exact else max(1, round(size / LONG_COPY))
        bounds = [i * size // num_stretches for i in range(num_stretches + 1)]
        total: Attended[A] | None = None
        for start, stop in itertools.pairwise(bounds):
            kept = self._store.read_by_head(layer, part.between(start, stop))
            own = mask if mask is None else mask[..., start:stop]
            found = attend(query, *kept, own)
            if total is None:
                total = found
            else:
                total.merge(found, None)
        assert total is not None
        return total

    def _indices_on(self, device: Any) -> Indices[A]:
        if device not in self._indices:
            self._indices[device] = Indices.of(self._operators, self._reading, device)
        return self._indices[device]

    def _masks_of(self, given: object, group_size: int, device: Any) -> PassMasks[A]:
        allowed = None if given is None else self._allowed[id(given)][1]
        key = (None if allowed is None else id(allowed), group_size, device)
        if key not in self._masks:
            of_pass = self._batch, self._reading, group_size, device
            self._masks[key] = PassMasks.of(self._operators, allowed, *of_pass)
        return self._masks[key]
