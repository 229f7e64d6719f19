"""LlamaRunner: forward passes of llama.cpp, in which each row extends a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.forward_batch import ForwardBatch, Runner
from genlm_backend.backends.llama_cpp.llama_context import LlamaContext, OutOfCellsError
from genlm_backend.backends.llama_cpp.sequence_states import SequenceRowStates
from genlm_backend.backends.llama_cpp.sequences import Sequences
from genlm_backend.prefix.nodes import Ints
from genlm_backend.prefix.prefix_tree import PrefixTree


class _Tokens(NamedTuple):
    """The ``n`` new tokens of a pass, flattened row by row."""

    row: NDArray[np.int64]  # [n]
    values: NDArray[np.int32]  # [n]
    positions: NDArray[np.int32]  # [n]
    has_output: NDArray[np.int8]  # [n]

    @classmethod
    def of(cls, batch: ForwardBatch) -> _Tokens:
        is_new = np.arange(batch.input_ids.shape[1]) < batch.num_new[:, None]
        has_output = np.zeros(is_new.shape, np.int8)
        has_output[batch.output_rows.numpy(), batch.output_columns.numpy()] = 1
        return cls(
            np.nonzero(is_new)[0],
            batch.input_ids.numpy()[is_new].astype(np.int32),
            batch.position_ids.numpy()[is_new].astype(np.int32),
            has_output[is_new],
        )


@final
class LlamaRunner(Runner):
    """Runs forward passes of one model, and returns the logits at each batch's outputs."""

    tree: PrefixTree
    has_nan = False

    def __init__(
        self, context: LlamaContext, length: int, num_slots: int, *, has_cells: bool
    ) -> None:
        self.model = self._context = context
        self._has_cells = has_cells
        self._sequences = Sequences(context, length, num_slots, self._compute_again)

    def forward(self, batch: ForwardBatch, attention: Any) -> torch.Tensor:
        """Return the logits at the outputs of a batch: float32 ``[num_outputs, vocab]``."""
        tokens = _Tokens.of(batch)
        if not len(batch.slot_mapping):
            logits = self._computed_apart(tokens)
        else:
            try:
                logits = self._computed_to_stay(batch, tokens)
            except OutOfCellsError:  # every sequence is empty now, so there is room
                logits = self._computed_to_stay(batch, tokens)
        self.num_forwards += 1
        self.tokens_computed += batch.num_new_tokens
        return logits

    def _computed_to_stay(self, batch: ForwardBatch, tokens: _Tokens) -> torch.Tensor:
        """Return the logits of rows whose tokens have slots; their sequences keep the tokens."""
        slots = batch.slot_mapping.numpy()
        ends = batch.past.nodes if self._has_cells else np.zeros(batch.num_rows, np.int64)
        self._sequences.release(slots)
        rows = self._sequences.place(self.tree.nodes, ends)
        states = batch.states
        assert states is None or isinstance(states, SequenceRowStates)
        logits = self._computed(rows, tokens, states)
        if self._has_cells:
            self._sequences.hold(rows, np.split(slots, np.cumsum(batch.num_new)[:-1]))
        return logits

    def _computed_apart(self, tokens: _Tokens) -> torch.Tensor:
        """Return the logits of rows that are not cached; on a NaN, compute each row alone."""
        # A NaN in any cell reaches every row, since 0 × NaN is NaN. The scheduler passes NaN
        # rows here again. So a row stays NaN only if it is NaN when run alone, in cleared cells.
        own, row = np.unique(tokens.row, return_inverse=True)
        is_alone = self.has_nan and len(own) == 1
        if self.has_nan:
            self.clear()
        rows = self._sequences.place(self.tree.nodes, np.zeros(len(own), np.int64))
        logits = self._computed(rows, tokens._replace(row=row))
        for sequence in rows.tolist():
            self._sequences.cut(sequence, 0)
        if logits.isnan().any():
            self.has_nan = True
            if not is_alone:
                parts = [_Tokens._make(of[tokens.row == i] for of in tokens) for i in own.tolist()]
                return torch.cat([self._computed_apart(part) for part in parts])
        return logits

    def _compute_again(self, sequence: int, start: int, token_ids: Ints) -> None:
        """Compute tokens into a sequence again, because no sequence holds them any more."""
        size = len(token_ids)
        positions, none = np.arange(start, start + size, dtype=np.int32), np.zeros(size, np.int8)
        tokens = _Tokens(np.zeros(size, np.int64), token_ids, positions, none)
        self._computed(np.array([sequence]), tokens)
        self.tokens_computed += size

    def _computed(
        self, rows: Ints, tokens: _Tokens, states: SequenceRowStates | None = None
    ) -> torch.Tensor:
        """Return the logits of rows in their sequences; if cells run out, empty idle sequences."""
        own = rows[tokens.row].astype(np.int32)
        while True:
            try:
                with self._context.in_states(rows, None if states is None else states.before):
                    logits = self._context.compute(*tokens[1:3], own, tokens.has_output)
                    if states is not None:
                        states.after = self._context.passed_states(rows)
                    return logits
            except OutOfCellsError:
                self._sequences.undo(rows)
                if not self._sequences.drop_idle():
                    self._sequences.clear()
                    raise
            except BaseException:  # the contents of the sequences are unknown
                self._sequences.clear()
                raise

    def clear(self) -> None:
        """Empty the tree and all sequences, pinned contexts included."""
        self.tree.clear()
        self._sequences.clear()
        self._context.clear()
        self.has_nan = False

    def pin(self, node: int) -> None:
        """Keep the tokens of the path to a node in a sequence that no row extends."""
        if self._has_cells:
            self._sequences.pin(self.tree.nodes, node)

    def running_states(self, layout: Any, before: Sequence[Any] | None) -> SequenceRowStates:
        return SequenceRowStates(None if before is None else before[0])
