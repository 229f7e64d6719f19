"""Indices and masks of a pass: what it reads in the slots of a store, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, final

import torch

from genlm_backend.attention.operators import A, Operators
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.reading import Part, Reading, Step


class Stored(Protocol[A]):
    """A store of keys and values, of any library."""

    @property
    def is_exact(self) -> bool:
        """Whether what is read is what was written."""
        ...

    def read_by_head(self, layer: int, slots: A | slice) -> tuple[A, A]:
        """Return keys and values of some slots: ``[B, heads, n, dim]`` each.

        Args:
            layer: The layer's index.
            slots: Which: ``[B, n]``; or a slice for one row of them, of which views are returned
                if the store is exact.
        """
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class PartIndices(Generic[A]):
    """Where the keys and values of a part are, and who attends to them.

    Attributes:
        rows: ``[G]``, or ``None`` for all rows of the pass.
        slots: ``[1, n]``, or a slice of the store where they follow one another.
        num_tokens: ``n``.
    """

    rows: A | None
    slots: A | slice
    num_tokens: int

    @classmethod
    def of(cls, operators: Operators[A], part: Part, num_rows: int, device: Any) -> PartIndices[A]:
        """Return the indices of a part of a pass of ``num_rows`` rows."""
        rows = _rows_of(operators, part, num_rows, device)
        if part.is_consecutive:
            return cls(rows, slice(int(part.slots[0]), int(part.slots[-1]) + 1), len(part))
        slots = operators.put(torch.from_numpy(part.slots), device)
        return cls(rows, slots[None], len(part))

    def between(self, start: int, stop: int) -> A | slice:
        """Return the slots of some of its tokens."""
        slots = self.slots
        if isinstance(slots, slice):
            return slice(slots.start + start, slots.start + stop)
        return slots if stop - start == self.num_tokens else slots[:, start:stop]


def _rows_of(operators: Operators[A], part: Part, num_rows: int, device: Any) -> A | None:
    if len(part.rows) == num_rows:
        return None
    return operators.put(torch.from_numpy(part.rows), device)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Indices(Generic[A]):
    """The indices of one pass of ``B`` rows, on one device.

    Attributes:
        operators: The operators of the library.
        device: The device.
        rest: ``[B, P]``: slots of what each row reads for itself.
        parts: The parts.
    """

    operators: Operators[A]
    device: Any
    rest: A
    parts: tuple[PartIndices[A], ...]

    @classmethod
    def of(cls, operators: Operators[A], reading: Reading, device: Any) -> Indices[A]:
        """Return those of a pass that reads so."""
        num_rows = len(reading.num_past)
        return cls(
            operators,
            device,
            operators.put(torch.from_numpy(reading.rest.slots), device),
            tuple(PartIndices.of(operators, part, num_rows, device) for part in reading.parts),
        )

    def stepped(self, reading: Reading, step: Step) -> Indices[A]:
        """Return those of the next decode step, of which a row and a slot each come to the device.

        Args:
            reading: How it is read.
            step: The way there from the reading of these indices.
        """
        operators, device, num_rows = self.operators, self.device, len(step.rows)
        rows, slots = (operators.put(torch.from_numpy(i), device) for i in (step.rows, step.slots))
        parts: list[PartIndices[A]] = []
        for number, part in zip(step.parts, reading.parts, strict=True):
            own = _rows_of(operators, part, num_rows, device)
            parts.append(PartIndices(own, self.parts[number].slots, len(part)))
        rest = operators.concat([self.rest[rows], slots[:, None]], 1)
        return Indices(operators, device, rest, tuple(parts))

    def beside(self, store: Stored[A], layer: int, keys: A, values: A) -> tuple[A, A]:
        """Return new keys and values after each row's own past: ``[B, heads, P + Q, dim]``."""
        if not self.rest.shape[1]:
            return keys, values
        concat, past = self.operators.concat, store.read_by_head(layer, self.rest)
        return concat([past[0], keys], 2), concat([past[1], values], 2)


def new_positions(batch: PackedBatch) -> torch.Tensor:
    """Return where the columns of new tokens stand in their contexts: int64 ``[B, Q]``."""
    first = torch.from_numpy(batch.num_past)
    return first[:, None] + torch.arange(batch.input_ids.shape[1], dtype=torch.int64)


@final
@dataclass(frozen=True, slots=True, eq=False)
class PassMasks(Generic[A]):
    """Which keys the queries of a pass may attend to, in layers of one kind.

    Heads of one group are queries of their own, the first head's ``Q`` before the second's.

    Attributes:
        operators: The operators of the library.
        device: Where the masks are.
        rest: What is added to scores: float32 ``[B, 1, group * Q, P + Q]`` of 0 and ``-inf``;
            ``None`` for zeros.
        parts: The same for each part, ``[1, 1, G * group * Q, n]``.
        is_read: Whether anything of each part may be attended to.
        is_causal: Whether ``rest`` says nothing but that new tokens see those before them.
    """

    operators: Operators[A]
    device: Any
    rest: A | None
    parts: tuple[A | None, ...]
    is_read: tuple[bool, ...]
    is_causal: bool

    @classmethod
    def of(
        cls,
        operators: Operators[A],
        allowed: torch.Tensor | None,
        batch: PackedBatch,
        reading: Reading,
        group_size: int,
        device: Any,
    ) -> PassMasks[A]:
        """Return the masks of a pass.

        Args:
            operators: The operators of the library.
            allowed: bool ``[B, 1, Q, L]`` over all positions; ``None`` where all before count.
            batch: The new tokens.
            reading: How what is cached is read.
            group_size: Number of heads that share a head of keys.
            device: Where the layers are.
        """
        new = new_positions(batch)
        positions = torch.cat([torch.from_numpy(reading.rest.positions), new], 1)[:, None, None, :]
        num_new = new.shape[1]
        is_there = positions >= 0
        if allowed is None:
            rest = is_there & (positions <= new[:, None, :, None])
            parts: list[torch.Tensor | None] = [None] * len(reading.parts)
        else:
            rest = is_there & allowed.gather(3, positions.clamp(min=0).expand(-1, 1, num_new, -1))
            parts = [
                allowed[torch.from_numpy(part.rows)].index_select(
                    3, torch.from_numpy(part.positions)
                )
                for part in reading.parts
            ]
        is_causal = allowed is None and bool(is_there.all())
        is_whole = is_causal and num_new == 1

        def added(mask: torch.Tensor) -> A:
            zeros = torch.zeros(mask.shape, dtype=torch.float32)
            return operators.put(zeros.masked_fill_(~mask, -torch.inf), device)

        return cls(
            operators,
            device,
            None if is_whole else added(_grouped(rest, group_size)),
            tuple(
                None if part is None or part.all() else added(_joined(part, group_size))
                for part in parts
            ),
            tuple(part is None or bool(part.any()) for part in parts),
            is_causal and not reading.rest.num_columns,
        )

    def stepped(self, reading: Reading, step: Step) -> PassMasks[A]:
        """Return those of the next decode step, where all before count in both.

        Args:
            reading: How it is read.
            step: The way there from the decode step that these are for.
        """
        operators, device, rest = self.operators, self.device, self.rest
        if rest is not None and not reading.rest.is_padded.any():
            rest = None  # the rows that had padding are gone
        if rest is not None:
            own = rest[operators.put(torch.from_numpy(step.rows), device)]
            rest = operators.concat([own, operators.zeros_like(own[..., :1])], 3)
        num_parts = len(reading.parts)
        nothing, everything = (None,) * num_parts, (True,) * num_parts
        return PassMasks(operators, device, rest, nothing, everything, False)


def _grouped(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """From ``[B, 1, Q, n]`` to ``[B, 1, group * Q, n]``."""
    num_rows, _, num_new, num_keys = mask.shape
    grouped = mask.expand(-1, group_size, -1, -1)
    return grouped.reshape(num_rows, 1, group_size * num_new, num_keys)


def _joined(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """From ``[G, 1, Q, n]`` to ``[1, 1, G * group * Q, n]``."""
    return _grouped(mask, group_size).reshape(1, 1, -1, mask.shape[-1])
