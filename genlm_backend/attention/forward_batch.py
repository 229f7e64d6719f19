"""The interfaces of a forward pass: its batch, its attention backend, and the runner.

New tokens are padded on the **right**, where the causal mask hides the padding from all real tokens
of the row. An ``AttentionBackend`` supplies the keys and values of the cached tokens.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.cascade_plan import CachedPrefixes, CascadePlan

Given = TypeVar("Given")


@final
@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Consecutive tokens of one context that go through the model in one pass."""

    token_ids: Sequence[int]
    slots: Sequence[int] | NDArray[Any] = ()
    outputs: Sequence[int] = ()
    position_offset: int = 0


class BatchStates(abc.ABC):
    """The recurrent states of the rows of one pass, before it and after it."""

    @abc.abstractmethod
    def begin(self, layers: list[Any]) -> None:
        """Put the rows' initial states into new cache layers, which the pass updates."""

    @abc.abstractmethod
    def behind(self, rows: NDArray[np.int64]) -> list[Any]:
        """Return the states after the last tokens of some rows, ``[len(rows), *shape]`` each.

        Args:
            rows: Indices of the rows, ascending.
        """


@final
@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The arrays of one forward pass of ``B`` rows, padded to ``Q`` new tokens."""

    input_ids: torch.Tensor  # [B, Q] int64
    position_ids: torch.Tensor  # [B, Q] int64
    slot_mapping: torch.Tensor  # [new tokens of all rows] int64
    unpadded_index: torch.Tensor | None  # [new tokens of all rows] int64
    output_rows: torch.Tensor  # [num_outputs] int64
    output_columns: torch.Tensor  # [num_outputs] int64
    num_new: NDArray[np.int64]  # [B] int64
    prefix_lens: NDArray[np.int64]  # [B] int64
    past: CachedPrefixes
    plan: CascadePlan | None = None
    states: BatchStates | None = None
    is_decode: bool = False

    _new_on: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = field(
        default_factory=dict, init=False, repr=False
    )

    def new_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``slot_mapping`` and ``unpadded_index`` on a device; copy them only once."""
        if device not in self._new_on:
            columns = self.unpadded_index
            moved = None if columns is None else columns.to(device)
            self._new_on[device] = self.slot_mapping.to(device), moved
        return self._new_on[device]

    @property
    def num_rows(self) -> int:
        return len(self.num_new)

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens to compute, padding not counted."""
        return int(self.num_new.sum())


def pack(
    chunks: Sequence[TokenChunk],
    past: CachedPrefixes | None = None,
    states: BatchStates | None = None,
) -> ForwardBatch:
    """Return a batch with a row for each chunk, padded to the length of the longest chunk."""
    num_new = np.array([len(chunk.token_ids) for chunk in chunks])
    past = CachedPrefixes.none(len(chunks)) if past is None else past
    prefix_lens = past.num_tokens
    num_columns = int(num_new.max())
    columns = np.arange(num_columns)
    is_new = columns < num_new[:, None]
    input_ids = np.zeros(is_new.shape, np.int64)
    input_ids[is_new] = _joined(chunk.token_ids for chunk in chunks)
    first = prefix_lens + np.array([chunk.position_offset for chunk in chunks])
    position_ids = first[:, None] + np.minimum(columns, num_new[:, None] - 1)
    slot_mapping = _joined(chunk.slots for chunk in chunks)
    unpadded_index = None if is_new.all() else torch.from_numpy(np.flatnonzero(is_new))
    outputs = [(index, column) for index, chunk in enumerate(chunks) for column in chunk.outputs]
    output_rows, output_columns = np.array(outputs, np.int64).reshape(-1, 2).T
    return ForwardBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        slot_mapping=torch.from_numpy(slot_mapping),
        unpadded_index=unpadded_index,
        output_rows=torch.from_numpy(output_rows.copy()),
        output_columns=torch.from_numpy(output_columns.copy()),
        num_new=num_new,
        prefix_lens=prefix_lens,
        past=past,
        states=states,
    )


def pack_decode(
    token_ids: NDArray[np.int64],
    slots: NDArray[np.int64],
    past: CachedPrefixes,
    plan: CascadePlan | None,
    states: BatchStates | None = None,
) -> ForwardBatch:
    """Return the batch of a decode step: one new token per row, whose logits are the output."""
    prefix_lens, (rows, columns, ones) = past.num_tokens, _of_step(len(token_ids))
    return ForwardBatch(
        input_ids=torch.from_numpy(token_ids)[:, None],
        position_ids=torch.from_numpy(prefix_lens)[:, None],
        slot_mapping=torch.from_numpy(slots),
        unpadded_index=None,
        output_rows=rows,
        output_columns=columns,
        num_new=ones,
        prefix_lens=prefix_lens,
        past=past,
        plan=plan,
        states=states,
        is_decode=True,
    )


@functools.lru_cache(maxsize=64)
def _of_step(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
    """Return the ``output_rows``, ``output_columns`` and ``num_new`` of a decode step."""
    with torch.inference_mode(False):  # inference tensors fail in autograd
        rows = torch.arange(num_rows, dtype=torch.int64)
        return rows, torch.zeros_like(rows), np.ones(num_rows, np.int64)


def _joined(sequences: Iterable[Sequence[int] | NDArray[Any]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(sequences), np.int64)


class AttentionBackend(abc.ABC, Generic[Given]):
    """How the new tokens of a forward pass attend to the cached tokens before them."""

    def plan(self, past: CachedPrefixes, num_new: NDArray[np.int64]) -> CascadePlan | None:
        """Return a cascade plan, or ``None`` if ``forward_context`` makes its own or needs none."""
        return None

    @abc.abstractmethod
    def forward_context(self, batch: ForwardBatch, model: Any) -> AbstractContextManager[Given]:
        """Return a context manager within which the runner makes one forward pass.

        A backend with a cache writes the new tokens' keys and values to the slots of the batch,
        during the pass or when the context exits.

        Returns:
            A context manager that yields further arguments of the model: a dictionary for
            transformers; for mlx-lm a list of caches, or ``None`` for the model's own caches.
        """


class Runner(abc.ABC):
    """Makes the forward passes of one model, and counts them."""

    model: Any
    num_forwards = 0
    tokens_computed = 0

    @abc.abstractmethod
    def forward(self, batch: ForwardBatch, attention: Any) -> torch.Tensor:
        """Return the logits at the batch's output positions: ``[num_outputs, model_vocab]``.

        Args:
            batch: The new tokens of each row.
            attention: The attention backend.
        """

    @abc.abstractmethod
    def running_states(self, layout: Any, before: Sequence[Any] | None) -> BatchStates:
        """Return the ``BatchStates`` of a pass, which begins from the states ``before``.

        Args:
            layout: The tensors of a state, with their layers and shapes.
            before: States after the cached tokens, from ``StatePool.read``; ``None`` if no row has
                cached tokens.
        """


@final
@dataclass(frozen=True, slots=True)
class AttentionFactory:
    """Makes an ``AttentionBackend`` over a pool: ``over`` for use, ``probing`` for trial passes."""

    over: Callable[[Any], AttentionBackend[Any]]
    probing: Callable[[Any], AttentionBackend[Any]]
    uses_interface: bool = False
