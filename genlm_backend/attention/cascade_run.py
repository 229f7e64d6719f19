"""Cascade attention of one forward pass: a cached prefix of several rows is read once for all.

The queries of all rows that share a prefix attend to it in one product. In another product, the
queries of each row attend to its other cached tokens and its new tokens. The results are merged by
the logsumexps of their scores (Hydragen: Juravsky et al., 2024, arXiv:2402.05099)::

    rows 0 1 2 ──▶ ┌ shared: 4,096 tokens, read once ┐ ──▶ ┌ rest 0 ┬ new 0 ┐
                   └─────────────────────────────────┘     ├ rest 1 ┼ new 1 ┤
                                                           └ rest 2 ┴ new 2 ┘

The reference is ``naive_attention`` in tests/naive.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, final

import numpy as np
import torch

from genlm_backend.attention.cascade_plan import CascadePlan
from genlm_backend.attention.forward_batch import ForwardBatch
from genlm_backend.attention.softmax_attention import (
    A,
    ArrayOps,
    AttentionState,
    SoftmaxAttention,
    join_rows,
)

LONG_COPY: Final = 4096
"""About how many tokens of a prefix are decoded at once, if the pool stores them rounded."""


class AnyKVPool(Protocol[A]):
    """A pool of keys and values, in the arrays of torch or MLX."""

    @property
    def is_exact(self) -> bool:
        """Whether reads return exactly the keys and values that were written."""
        ...

    def read_by_head(self, layer: int, slots: A | slice) -> tuple[A, A]:
        """Return keys and values ``[B, heads, n, dim]`` of slots ``[B, n]``, or a slice (B = 1)."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class Block(Generic[A]):
    """Cached keys that one product reads, the rows that attend to them, and the mask."""

    # The ``group`` heads that share a key head become extra queries: ``Q`` of each, head by head.
    rows: A | None  # [G] indices; ``None`` for all rows
    slots: A | slice  # [1, n] of a prefix, or [B, P] of suffixes
    num_tokens: int
    mask: A | None  # float32 [1, 1, G * group * Q, n], or [B, 1, group * Q, P + Q]

    def slots_in(self, start: int, stop: int) -> A | slice:
        slots = self.slots
        if isinstance(slots, slice):
            return slice(slots.start + start, slots.start + stop)
        return slots if stop - start == self.num_tokens else slots[:, start:stop]


def new_positions(batch: ForwardBatch) -> torch.Tensor:
    """Return the context positions of new tokens and of their padding: int64 ``[B, Q]``."""
    first = torch.from_numpy(batch.prefix_lens)
    return first[:, None] + torch.arange(batch.input_ids.shape[1], dtype=torch.int64)


def _grouped(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """Repeat a mask for each head of a group: ``[B, 1, Q, n]`` to ``[B, 1, group * Q, n]``."""
    num_rows, _, num_new, num_keys = mask.shape
    grouped = mask.expand(-1, group_size, -1, -1)
    return grouped.reshape(num_rows, 1, group_size * num_new, num_keys)


class CascadeRun(Generic[A]):
    """The attention of one forward pass, which its layers call in turn."""

    ops: ArrayOps[A]
    attends_otherwise: Callable[[str], Exception]
    """Makes the error for a model whose layers attend in an unsupported way."""

    def __init__(self, pool: AnyKVPool[A], batch: ForwardBatch, plan: CascadePlan) -> None:
        self._pool, self._batch, self._plan = pool, batch, plan
        self.max_prefix_len = int(batch.prefix_lens.max())
        self._blocks: dict[tuple[object, ...], tuple[Block[A], list[Block[A]]]] = {}
        # By ``id``: each mask object that layers get, and its bool mask.
        self._allowed: dict[int, tuple[object, torch.Tensor | None]] = {}
        # The layer that has called ``take_kv`` but not ``attend`` yet, its keys and its values.
        self._new: tuple[int, A, A] | None = None
        self.num_attended = 0

    def is_complete(self, num_layers: int) -> bool:
        """Return whether ``num_layers`` layers attended, and none has only called ``take_kv``."""
        return self._new is None and self.num_attended == num_layers

    def take_kv(self, layer: int, keys: A, values: A) -> tuple[A, A]:
        """Record a layer's new keys and values, ``[B, key_heads, Q, dim]``; return them."""
        if self._new is not None:
            raise self.attends_otherwise(
                "a layer cached keys and values without calling the attention function"
            )
        self._new = layer, keys, values
        return keys, values

    def attend(
        self,
        query: A,
        keys: A,
        values: A,
        given: object,
        scaling: float,
        softcap: float | None = None,
        sinks: A | None = None,
    ) -> A:
        """Attend where the mask ``given`` allows it; return ``[B, heads, Q, value_dim]``."""
        if self._new is None or self._new[1] is not keys or self._new[2] is not values:
            raise self.attends_otherwise(
                "a layer attends to keys or values other than the ones it cached"
            )
        if given is not None and id(given) not in self._allowed:
            raise self.attends_otherwise("a layer uses a mask that was not made for this pass")
        layer, ops = self._new[0], self.ops
        self._new = None
        self.num_attended += 1

        num_rows, num_heads, num_new, dim = query.shape
        num_groups, group_size = keys.shape[1], num_heads // keys.shape[1]
        packed = query.reshape(num_rows, num_groups, group_size * num_new, dim)
        softmax = SoftmaxAttention(ops, scaling, softcap)
        allowed = None if given is None else self._allowed[id(given)][1]
        key = (None if allowed is None else id(allowed), group_size, ops.device_of(query))
        if key not in self._blocks:
            self._blocks[key] = self._blocks_of(allowed, *key[1:])
        suffix, prefixes = self._blocks[key]
        causal_group = 0
        if suffix.num_tokens:
            past = self._pool.read_by_head(layer, suffix.slots)
            keys, values = (
                ops.lib.concatenate([*pair], 2) for pair in zip(past, (keys, values), strict=True)
            )
        elif allowed is None:
            causal_group = group_size
        total = softmax.attend(packed, keys, values, suffix.mask, causal_group)
        for block in prefixes:
            queries = packed if block.rows is None else packed[block.rows]
            shared = self._in_block(softmax, join_rows(queries), layer, block)
            total.merge_state(shared.split_rows(len(queries)), block.rows)
        by_head = num_rows, num_heads, num_new
        found = total.values.reshape(*by_head, -1)
        if sinks is None:
            return found
        # A sink adds one score per query to the softmax, without a value.
        sums = total.logsumexp.reshape(*by_head)
        share = ops.lib.sigmoid(sums - ops.as_type_of(sinks[:, None], sums))[..., None]
        return found * ops.as_type_of(share, found)

    def _in_block(
        self, softmax: SoftmaxAttention[A], query: A, layer: int, block: Block[A]
    ) -> AttentionState[A]:
        """Attend to a block, about ``LONG_COPY`` tokens at a time unless the pool is exact."""
        mask, size = block.mask, block.num_tokens
        attend = softmax.attend if mask is None else softmax.attend_if_any
        num_parts = 1 if self._pool.is_exact else max(1, round(size / LONG_COPY))
        bounds = [i * size // num_parts for i in range(num_parts + 1)]
        total: AttentionState[A] | None = None
        for start, stop in itertools.pairwise(bounds):
            kept = self._pool.read_by_head(layer, block.slots_in(start, stop))
            found = attend(query, *kept, mask if mask is None else mask[..., start:stop])
            if total is None:
                total = found
            else:
                total.merge_state(found, None)
        assert total is not None
        return total

    def _blocks_of(
        self, allowed: torch.Tensor | None, group_size: int, device: Any
    ) -> tuple[Block[A], list[Block[A]]]:
        """Return the suffix block, and each prefix block in which a layer's mask allows some key.

        Args:
            allowed: The mask, bool ``[B, 1, Q, positions]``; ``None`` for a causal one.
            group_size: Number of query heads per key head.
            device: The device of the layer's queries.
        """
        plan = self._plan

        def put(array: np.ndarray) -> A:
            return self.ops.put(torch.from_numpy(array), device)

        def added(mask: torch.Tensor) -> A:
            zeros = torch.zeros(mask.shape, dtype=torch.float32)
            return self.ops.put(zeros.masked_fill_(~mask, -torch.inf), device)

        slots, mask = plan.suffix[0], None
        num_rows, num_columns = slots.shape
        num_new = self._batch.input_ids.shape[1]
        if allowed is not None or num_new > 1 or plan.is_padded:
            new = new_positions(self._batch)
            columns = torch.cat([torch.from_numpy(plan.suffix[1]), new], 1)[:, None, None, :]
            if allowed is None:
                is_seen = columns <= new[:, None, :, None]
            else:
                is_seen = allowed.gather(3, columns.clamp(min=0).expand(-1, 1, num_new, -1))
            mask = added(_grouped(is_seen & (columns >= 0), group_size))
        suffix = Block(None, put(slots), num_columns, mask)
        prefixes: list[Block[A]] = []
        for prefix in plan.prefixes:
            mask = None
            if allowed is not None:
                rows, positions = map(torch.from_numpy, (prefix.rows, prefix.positions))
                is_seen = allowed[rows].index_select(3, positions)
                if not is_seen.any():
                    continue
                if not is_seen.all():
                    mask = added(_grouped(is_seen, group_size).reshape(1, 1, -1, len(prefix)))
            place = slice(int(prefix.slots[0]), int(prefix.slots[-1]) + 1)
            is_in_place = bool((np.diff(prefix.slots) == 1).all())
            prefixes.append(
                Block(
                    None if len(prefix.rows) == num_rows else put(prefix.rows),
                    place if is_in_place else put(prefix.slots)[None],
                    len(prefix),
                    mask,
                )
            )
        return suffix, prefixes
