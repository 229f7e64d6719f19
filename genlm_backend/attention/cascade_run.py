"""Attention of one forward pass in which what several rows have cached is read once for all.

The queries of all rows that share a stretch of tokens go to it in one product, those of a row go
to the rest of its past and to its new tokens in another, and the two are merged by the logarithms
of their sums (Hydragen: Juravsky et al., 2024, arXiv:2402.05099)::

    rows 0 1 2 ──▶ ┌ shared: 4,096 tokens, read once ┐ ──▶ ┌ rest 0 ┬ new 0 ┐
                   └─────────────────────────────────┘     ├ rest 1 ┼ new 1 ┤
                                                           └ rest 2 ┴ new 2 ┘
"""

from __future__ import annotations

import abc
import itertools
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, final

import torch

from genlm_backend.attention.cascade_plan import CascadePlan, PlanDelta, SharedPrefix
from genlm_backend.attention.forward_batch import ForwardBatch
from genlm_backend.attention.softmax_attention import (
    A,
    ArrayOps,
    AttentionState,
    SoftmaxAttention,
    join_rows,
)
from genlm_backend.errors import ModelStateError

LONG_COPY: Final = 4096
"""Tokens of a part, about, whose keys and values are decoded at once if they are in codes."""


class AnyKVPool(Protocol[A]):
    """A store of keys and values, of any library."""

    @property
    def is_exact(self) -> bool:
        """Whether what is read is what was written."""
        ...

    def read_by_head(self, layer: int, slots: A | slice) -> tuple[A, A]:
        """Return keys and values of some slots: ``[B, heads, n, dim]`` each."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class PrefixIndices(Generic[A]):
    """Where the keys and values of a part are, and who attends to them."""

    rows: A | None  # [G]
    slots: A | slice  # [1, n]
    num_tokens: int

    @classmethod
    def of(
        cls, ops: ArrayOps[A], prefix: SharedPrefix, num_rows: int, device: Any
    ) -> PrefixIndices[A]:
        rows = _rows_of(ops, prefix, num_rows, device)
        if prefix.is_consecutive:
            return cls(rows, slice(int(prefix.slots[0]), int(prefix.slots[-1]) + 1), len(prefix))
        slots = ops.put(torch.from_numpy(prefix.slots), device)
        return cls(rows, slots[None], len(prefix))

    def between(self, start: int, stop: int) -> A | slice:
        slots = self.slots
        if isinstance(slots, slice):
            return slice(slots.start + start, slots.start + stop)
        return slots if stop - start == self.num_tokens else slots[:, start:stop]


def _rows_of(ops: ArrayOps[A], prefix: SharedPrefix, num_rows: int, device: Any) -> A | None:
    if len(prefix.rows) == num_rows:
        return None
    return ops.put(torch.from_numpy(prefix.rows), device)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Indices(Generic[A]):
    """The indices of one pass of ``B`` rows, on one device."""

    ops: ArrayOps[A]
    device: Any
    suffix: A  # [B, P]
    prefixes: tuple[PrefixIndices[A], ...]

    @classmethod
    def of(cls, ops: ArrayOps[A], plan: CascadePlan, device: Any) -> Indices[A]:
        num_rows = len(plan.prefix_lens)
        return cls(
            ops,
            device,
            ops.put(torch.from_numpy(plan.suffix.slots), device),
            tuple(PrefixIndices.of(ops, prefix, num_rows, device) for prefix in plan.prefixes),
        )

    def advanced(self, plan: CascadePlan, advance: PlanDelta) -> Indices[A]:
        """Return the indices of the next step; one row and one slot each go to the device."""
        ops, device, num_rows = self.ops, self.device, len(advance.rows)
        rows, slots = (ops.put(torch.from_numpy(i), device) for i in (advance.rows, advance.slots))
        prefixes: list[PrefixIndices[A]] = []
        for number, prefix in zip(advance.prefixes, plan.prefixes, strict=True):
            own = _rows_of(ops, prefix, num_rows, device)
            prefixes.append(PrefixIndices(own, self.prefixes[number].slots, len(prefix)))
        suffix = ops.lib.concatenate([self.suffix[rows], slots[:, None]], 1)
        return Indices(ops, device, suffix, tuple(prefixes))

    def beside(self, pool: AnyKVPool[A], layer: int, keys: A, values: A) -> tuple[A, A]:
        """Return new keys and values after each row's own past: ``[B, heads, P + Q, dim]``."""
        if not self.suffix.shape[1]:
            return keys, values
        concat, past = self.ops.lib.concatenate, pool.read_by_head(layer, self.suffix)
        return concat([past[0], keys], 2), concat([past[1], values], 2)


def new_positions(batch: ForwardBatch) -> torch.Tensor:
    """Return where the columns of new tokens stand in their contexts: int64 ``[B, Q]``."""
    first = torch.from_numpy(batch.prefix_lens)
    return first[:, None] + torch.arange(batch.input_ids.shape[1], dtype=torch.int64)


@final
@dataclass(frozen=True, slots=True, eq=False)
class PassMasks(Generic[A]):
    """Which keys the queries of a pass may attend to, in layers of one kind."""

    # Heads of a group are queries of their own, the first head's ``Q`` before the second's.
    ops: ArrayOps[A]
    device: Any
    suffix: A | None  # [B, 1, group * Q, P + Q] float32
    prefixes: tuple[A | None, ...]  # [1, 1, G * group * Q, n]
    is_read: tuple[bool, ...]
    is_causal: bool

    @classmethod
    def of(
        cls,
        ops: ArrayOps[A],
        allowed: torch.Tensor | None,
        batch: ForwardBatch,
        plan: CascadePlan,
        group_size: int,
        device: Any,
    ) -> PassMasks[A]:
        new = new_positions(batch)
        positions = torch.cat([torch.from_numpy(plan.suffix.positions), new], 1)[:, None, None, :]
        num_new = new.shape[1]
        is_there = positions >= 0
        if allowed is None:
            suffix = is_there & (positions <= new[:, None, :, None])
            prefixes: list[torch.Tensor | None] = [None] * len(plan.prefixes)
        else:
            suffix = is_there & allowed.gather(3, positions.clamp(min=0).expand(-1, 1, num_new, -1))
            prefixes = [
                allowed[torch.from_numpy(prefix.rows)].index_select(
                    3, torch.from_numpy(prefix.positions)
                )
                for prefix in plan.prefixes
            ]
        is_causal = allowed is None and bool(is_there.all())
        is_whole = is_causal and num_new == 1

        def added(mask: torch.Tensor) -> A:
            zeros = torch.zeros(mask.shape, dtype=torch.float32)
            return ops.put(zeros.masked_fill_(~mask, -torch.inf), device)

        return cls(
            ops,
            device,
            None if is_whole else added(_grouped(suffix, group_size)),
            tuple(
                None if prefix is None or prefix.all() else added(_joined(prefix, group_size))
                for prefix in prefixes
            ),
            tuple(prefix is None or bool(prefix.any()) for prefix in prefixes),
            is_causal and not plan.suffix.num_columns,
        )

    def advanced(self, plan: CascadePlan, advance: PlanDelta) -> PassMasks[A]:
        """Return the masks of the next decode step, where all before count in both."""
        ops, device, suffix = self.ops, self.device, self.suffix
        if suffix is not None and not plan.suffix.is_padded.any():
            suffix = None  # the rows that had padding are gone
        if suffix is not None:
            own = suffix[ops.put(torch.from_numpy(advance.rows), device)]
            suffix = ops.lib.concatenate([own, ops.lib.zeros_like(own[..., :1])], 3)
        num_prefixes = len(plan.prefixes)
        nothing, everything = (None,) * num_prefixes, (True,) * num_prefixes
        return PassMasks(ops, device, suffix, nothing, everything, False)


def _grouped(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """From ``[B, 1, Q, n]`` to ``[B, 1, group * Q, n]``."""
    num_rows, _, num_new, num_keys = mask.shape
    grouped = mask.expand(-1, group_size, -1, -1)
    return grouped.reshape(num_rows, 1, group_size * num_new, num_keys)


def _joined(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """From ``[G, 1, Q, n]`` to ``[1, 1, G * group * Q, n]``."""
    return _grouped(mask, group_size).reshape(1, 1, -1, mask.shape[-1])


class LastArrays(NamedTuple):
    """Arrays of the last pass, a decode step, of which those of the next one are made."""

    identity: object
    indices: dict[Any, Indices[Any]]
    masks: dict[tuple[object, ...], PassMasks[Any]]


class CascadeRun(abc.ABC, Generic[A]):
    """The attention of the layers of one forward pass, one after another."""

    ops: ArrayOps[A]

    def __init__(
        self, pool: AnyKVPool[A], batch: ForwardBatch, plan: CascadePlan, last: LastArrays | None
    ) -> None:
        self._pool, self._batch, self._plan = pool, batch, plan
        self.max_prefix_len = int(batch.prefix_lens.max())
        # Made when first needed on a device; a decode step makes them of the last one's there, if
        # it goes on from that.
        self._indices: dict[Any, Indices[A]] = {}
        self._masks: dict[tuple[object, ...], PassMasks[A]] = {}
        # What layers have been given for a mask, by identity, and who it says may see what.
        self._allowed: dict[int, tuple[object, torch.Tensor | None]] = {}
        # The layer whose new keys and values have come, and no query yet, and these.
        self._new: tuple[int, A, A] | None = None
        self.num_attended = 0
        advance = plan.advance
        if advance is not None and last is not None and last.identity is advance.before:
            for device, indices in last.indices.items():
                self._indices[device] = indices.advanced(plan, advance)
            for key, masks in last.masks.items():
                self._masks[key] = masks.advanced(plan, advance)

    @staticmethod
    @abc.abstractmethod
    def attends_otherwise(how: str) -> ModelStateError:
        """Return the error of a model that attends in a way that ours cannot stand for."""

    def for_later(self) -> LastArrays | None:
        """Return the indices and masks that the next step goes on from; ``None`` after no step."""
        if self._batch.input_ids.shape[1] > 1:
            return None
        # Those of windows are functions of positions, which the next step has others of.
        masks = {key: masks for key, masks in self._masks.items() if key[0] is None}
        return LastArrays(self._plan.identity, self._indices, masks)

    def is_complete(self, num_layers: int) -> bool:
        """Whether so many layers have attended, and none has yet to."""
        return self._new is None and self.num_attended == num_layers

    def take_kv(self, layer: int, keys: A, values: A) -> tuple[A, A]:
        """Take and return new keys and values of a layer, ``[B, key_heads, Q, dim]``."""
        if self._new is not None:
            raise self.attends_otherwise("a layer has attended elsewhere")
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
        """Attend to the parts and to the rest, and merge: ``[B, heads, Q, value_dim]``."""
        if self._new is None or self._new[1] is not keys or self._new[2] is not values:
            raise self.attends_otherwise("to keys or values that are others than the kept ones")
        if given is not None and id(given) not in self._allowed:
            raise self.attends_otherwise("with a mask that is made in another way")
        layer, ops = self._new[0], self.ops
        self._new = None
        self.num_attended += 1

        num_rows, num_heads, num_new, dim = query.shape
        num_groups, group_size = keys.shape[1], num_heads // keys.shape[1]
        packed = query.reshape(num_rows, num_groups, group_size * num_new, dim)
        block = SoftmaxAttention(ops, scaling, softcap)
        indices, masks = self._made(given, group_size, ops.device_of(query))
        total = block.attend_causally(packed, keys, values, group_size) if masks.is_causal else None
        if total is None:
            beside = indices.beside(self._pool, layer, keys, values)
            total = block.attend(packed, *beside, masks.suffix)
        for prefix, own, is_read in zip(
            indices.prefixes, masks.prefixes, masks.is_read, strict=True
        ):
            if is_read:
                queries = packed if prefix.rows is None else packed[prefix.rows]
                shared = self._in_prefix(block, join_rows(queries), layer, prefix, own)
                total.merge_state(shared.split_rows(len(queries)), prefix.rows)
        by_head = num_rows, num_heads, num_new
        found = total.values.reshape(*by_head, -1)
        if sinks is None:
            return found
        total = AttentionState(ops, found, total.logsumexp.reshape(*by_head))
        return total.with_sinks(sinks[:, None])

    def _in_prefix(
        self,
        block: SoftmaxAttention[A],
        query: A,
        layer: int,
        prefix: PrefixIndices[A],
        mask: A | None,
    ) -> AttentionState[A]:
        """Attend to a part: at once if it is read in place, or else stretch by stretch."""
        attend = block.attend if mask is None else block.attend_if_any
        size = prefix.num_tokens
        num_extents = 1 if self._pool.is_exact else max(1, round(size / LONG_COPY))
        bounds = [i * size // num_extents for i in range(num_extents + 1)]
        total: AttentionState[A] | None = None
        for start, stop in itertools.pairwise(bounds):
            kept = self._pool.read_by_head(layer, prefix.between(start, stop))
            own = mask if mask is None else mask[..., start:stop]
            found = attend(query, *kept, own)
            if total is None:
                total = found
            else:
                total.merge_state(found, None)
        assert total is not None
        return total

    def _made(self, given: object, group_size: int, device: Any) -> tuple[Indices[A], PassMasks[A]]:
        """Return the indices on a device, and the masks of layers of one kind there."""
        if device not in self._indices:
            self._indices[device] = Indices.of(self.ops, self._plan, device)
        allowed = None if given is None else self._allowed[id(given)][1]
        key = (None if allowed is None else id(allowed), group_size, device)
        if key not in self._masks:
            of_pass = self._batch, self._plan, group_size, device
            self._masks[key] = PassMasks.of(self.ops, allowed, *of_pass)
        return self._indices[device], self._masks[key]
