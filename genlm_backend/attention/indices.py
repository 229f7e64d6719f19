"""Indices: what a pass reads and writes in the slots of a store, as tensors on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import torch

from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.reading import Part, Reading, Step
from genlm_backend.prefix import KVStore


@final
@dataclass(frozen=True, slots=True, eq=False)
class PartIndices:
    """Where the keys and values of a part are, and who attends to them.

    Attributes:
        rows: int64 ``[G]``, or ``None`` for all rows of the pass.
        slots: int64 ``[n]``, or a slice of the store where they follow one another.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor | slice

    @classmethod
    def of(cls, part: Part, num_rows: int, device: torch.device) -> Self:
        """Return the indices of a part of a pass of ``num_rows`` rows."""
        rows = _rows_of(part, num_rows, device)
        if part.is_consecutive:
            return cls(rows, slice(int(part.slots[0]), int(part.slots[-1]) + 1))
        return cls(rows, torch.from_numpy(part.slots).to(device))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the part."""
        slots = self.slots
        return slots.stop - slots.start if isinstance(slots, slice) else len(slots)

    def read(
        self, store: KVStore, layer: int, num_heads: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some tokens of the part, ``[1, heads, n, dim]`` each.

        They are views where they lie together and the store is exact.
        """
        slots = self.slots
        if isinstance(slots, slice):
            slots = slice(slots.start + start, slots.start + stop)
        elif stop - start < len(slots):
            slots = slots[start:stop]
        keys, values = store.read(layer, slots)
        shape = 1, len(keys), num_heads, -1
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)


def _rows_of(part: Part, num_rows: int, device: torch.device) -> torch.Tensor | None:
    return None if len(part.rows) == num_rows else torch.from_numpy(part.rows).to(device)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Indices:
    """The index tensors of one pass of ``B`` rows, on one device.

    Attributes:
        new_slots: As in ``PackedBatch``.
        new_columns: As there.
        rest: int64 ``[B, P]``: slots of what each row reads for itself.
        parts: The parts.
    """

    new_slots: torch.Tensor
    new_columns: torch.Tensor | None
    rest: torch.Tensor
    parts: tuple[PartIndices, ...]

    @classmethod
    def of(cls, batch: PackedBatch, reading: Reading, device: torch.device) -> Self:
        """Return those of a packed batch that is read in this way."""
        columns = batch.new_columns
        return cls(
            batch.new_slots.to(device),
            None if columns is None else columns.to(device),
            torch.from_numpy(reading.rest.slots).to(device),
            tuple(PartIndices.of(part, batch.num_rows, device) for part in reading.parts),
        )

    def stepped(self, batch: PackedBatch, reading: Reading, step: Step) -> Indices:
        """Return those of the next decode step, of which a row and a slot each come to the device.

        Args:
            batch: The packed step.
            reading: How it is read.
            step: The way there from the reading of these indices.
        """
        device = self.rest.device
        rows, slots = (torch.from_numpy(own).to(device) for own in (step.rows, step.slots))
        return Indices(
            batch.new_slots.to(device),
            None,
            torch.cat([self.rest[rows], slots[:, None]], 1),
            tuple(
                PartIndices(_rows_of(part, batch.num_rows, device), self.parts[number].slots)
                for number, part in zip(step.parts, reading.parts, strict=True)
            ),
        )

    def write(
        self, store: KVStore, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, ``[B, heads, Q, dim]``, without the padding.

        Returns:
            The same as they will be read, with zeros for the padding.
        """
        rows = store.write(layer, self.new_slots, by_token(keys, values, self.new_columns))
        return (keys, values) if store.is_exact else by_head(rows, self.new_columns, keys, values)

    def beside(
        self, store: KVStore, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new keys and values after each row's own past: ``[B, heads, P + Q, dim]``."""
        if not self.rest.shape[1]:
            return keys, values
        past = store.read(layer, self.rest.view(-1))
        joined = [
            torch.cat([kept.view(len(new), -1, new.shape[1], new.shape[3]).transpose(1, 2), new], 2)
            for kept, new in zip(past, (keys, values), strict=True)
        ]
        return joined[0], joined[1]


def by_token(
    keys: torch.Tensor, values: torch.Tensor, columns: torch.Tensor | None
) -> torch.Tensor:
    """From ``[B, heads, Q, dim]`` each to rows of both, ``[num_new, width]``, without padding."""
    states = [keys.transpose(1, 2), values.transpose(1, 2)]  # [B, Q, heads, dim]
    if keys.shape[3] != values.shape[3]:
        states = [of_heads.flatten(2) for of_heads in states]
    rows = torch.cat(states, 2).reshape(len(keys) * keys.shape[2], -1)
    return rows if columns is None else rows.index_select(0, columns)


def by_head(
    rows: torch.Tensor, columns: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """From rows back to keys and values in the shapes of those given, the padding zeros."""
    num_rows, num_heads, num_new, dim = keys.shape
    if columns is not None:
        padded = rows.new_zeros(num_rows * num_new, rows.shape[1])
        rows = padded.index_copy_(0, columns, rows)
    found = rows.view(num_rows, num_new, -1).tensor_split([num_heads * dim], 2)
    kept = [
        part.unflatten(2, (states.shape[1], states.shape[3])).transpose(1, 2)
        for part, states in zip(found, (keys, values), strict=True)
    ]
    return kept[0], kept[1]


def new_positions(batch: PackedBatch) -> torch.Tensor:
    """Return where the columns of new tokens stand in their contexts: int64 ``[B, Q]``."""
    first = torch.from_numpy(batch.num_past)
    return first[:, None] + torch.arange(batch.input_ids.shape[1], dtype=torch.int64)


@final
@dataclass(frozen=True, slots=True, eq=False)
class PassMasks:
    """Which keys the queries of a pass may attend to, in layers of one kind.

    Heads of one group are queries of their own, the first head's ``Q`` before the second's.

    Attributes:
        rest: What is added to scores: float32 ``[B, 1, group * Q, P + Q]`` of 0 and ``-inf``;
            ``None`` for zeros.
        parts: The same for each part, ``[1, 1, G * group * Q, n]``.
        is_read: Whether anything of each part may be attended to.
        is_causal: Whether ``rest`` says nothing but that new tokens see those before them.
    """

    rest: torch.Tensor | None
    parts: tuple[torch.Tensor | None, ...]
    is_read: tuple[bool, ...]
    is_causal: bool

    @classmethod
    def of(
        cls,
        allowed: torch.Tensor | None,
        batch: PackedBatch,
        reading: Reading,
        group_size: int,
        device: torch.device,
    ) -> Self:
        """Return the masks of a pass.

        Args:
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
        return cls(
            None if is_whole else _added(_grouped(rest, group_size), device),
            tuple(
                None if part is None or part.all() else _added(_joined(part, group_size), device)
                for part in parts
            ),
            tuple(part is None or bool(part.any()) for part in parts),
            is_causal and not reading.rest.num_columns,
        )

    def stepped(self, reading: Reading, step: Step) -> PassMasks:
        """Return those of the next decode step, where all before count in both.

        Args:
            reading: How it is read.
            step: The way there from the decode step that these are for.
        """
        rest = self.rest
        if rest is not None and not reading.rest.is_padded.any():
            rest = None  # the rows that had padding are gone
        if rest is not None:
            own = rest[torch.from_numpy(step.rows).to(rest.device)]
            rest = torch.cat([own, torch.zeros_like(own[..., :1])], 3)
        num_parts = len(reading.parts)
        return PassMasks(rest, (None,) * num_parts, (True,) * num_parts, False)


def _grouped(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """From ``[B, 1, Q, n]`` to ``[B, 1, group * Q, n]``."""
    num_rows, _, num_new, num_keys = mask.shape
    grouped = mask.expand(-1, group_size, -1, -1)
    return grouped.reshape(num_rows, 1, group_size * num_new, num_keys)


def _joined(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """From ``[G, 1, Q, n]`` to ``[1, 1, G * group * Q, n]``."""
    return _grouped(mask, group_size).reshape(1, 1, -1, mask.shape[-1])


def _added(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf).to(device)
