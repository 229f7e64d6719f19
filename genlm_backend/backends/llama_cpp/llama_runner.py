"""LlamaRunner: forward passes of llama.cpp over rows that go on in its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.packing import PackedBatch, RowStates, Span, pack
from genlm_backend.backends.llama_cpp.llama_context import LlamaContext
from genlm_backend.backends.llama_cpp.sequence_states import SequenceRowStates
from genlm_backend.backends.llama_cpp.sequences import Cut, Sequences
from genlm_backend.errors import EvaluationError
from genlm_backend.passes.forwards import Runner
from genlm_backend.prefix import PrefixTree


class _Tokens(NamedTuple):
    """Tokens of the rows of a pass, one row after another."""

    num_new: NDArray[np.int64]  # [B]
    values: NDArray[np.int32]  # [n] int32
    positions: NDArray[np.int32]  # [n] int32
    has_output: NDArray[np.int8]  # [n] int8

    def of(self, sequences: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Return the arguments of ``LlamaContext.compute``, given the sequences of the rows."""
        own = np.repeat(sequences, self.num_new).astype(np.int32)
        return self.values, self.positions, own, self.has_output

    def rows(self) -> Iterator[_Tokens]:
        """Yield the tokens of each row."""
        stops = np.cumsum(self.num_new)
        for start, stop in zip((stops - self.num_new).tolist(), stops.tolist(), strict=True):
            part = slice(start, stop)
            own = self.values[part], self.positions[part], self.has_output[part]
            yield _Tokens(np.array([stop - start]), *own)


@final
class LlamaRunner(Runner):
    """Forward passes of one model: spans in, logits at the wanted positions out."""

    tree: PrefixTree
    is_spoilt = False

    def __init__(self, context: LlamaContext, length: int, num_slots: int) -> None:
        self.model = self._context = context
        self.num_forwards = self.tokens_computed = self._settled = 0
        count, window = context.size.sequences.num_contexts, context.model.window
        self._sequences = Sequences(count, length, num_slots, self._evict, window)

    def _evict(self, slots: NDArray[np.int32]) -> bool:
        return self.tree.evict_slots(slots)

    def forward(self, spans: Sequence[Span] | PackedBatch, attend: Any) -> torch.Tensor:
        """Return the logits at each span's outputs: float32 ``[num_outputs, vocab]``."""
        batch = spans if isinstance(spans, PackedBatch) else pack(spans)
        is_new = np.arange(batch.input_ids.shape[1]) < batch.num_new[:, None]
        has_output = np.zeros(is_new.shape, np.int8)
        has_output[batch.output_rows.numpy(), batch.output_columns.numpy()] = 1
        tokens = _Tokens(
            batch.num_new,
            batch.input_ids.numpy()[is_new].astype(np.int32),
            batch.position_ids.numpy()[is_new].astype(np.int32),
            has_output[is_new],
        )
        if len(batch.new_slots):
            logits = self._computed_to_stay(batch, tokens)
        else:
            logits = self._computed_apart(tokens)
        self.num_forwards += 1
        self.tokens_computed += batch.num_new_tokens
        return logits

    def _computed_to_stay(self, batch: PackedBatch, tokens: _Tokens) -> torch.Tensor:
        """Return the logits of rows whose tokens have slots, and keep these tokens."""
        self.is_spoilt = True  # unless all of this goes well
        rows = self._kept(batch)
        before = self._sequences.sizes[rows].tolist()
        try:
            logits = self._computed(rows, tokens, batch.states)
        except BaseException:
            self._undo(rows, before)
            self.is_spoilt = False
            raise
        slots = np.split(batch.new_slots.numpy(), np.cumsum(batch.num_new)[:-1])
        for sequence, own in zip(rows.tolist(), slots, strict=True):
            self._sequences.hold(sequence, own)
        self.is_spoilt = False
        return logits

    def _computed(
        self, rows: NDArray[np.int64], tokens: _Tokens, states: RowStates | None
    ) -> torch.Tensor:
        """Return the logits of rows in sequences, which come to states if there are any."""
        if states is None:
            return self._context.compute(*tokens.of(rows))
        assert isinstance(states, SequenceRowStates)
        with self._context.in_states(rows, states.before) as states.after:
            return self._context.compute(*tokens.of(rows))

    def _computed_apart(self, tokens: _Tokens) -> torch.Tensor:
        """Return the logits of rows of which nothing is kept; one by one where there is a NaN.

        A NaN in a cell comes to every row, since what is masked has a weight of zero. Rows of a
        pass that keeps its tokens are computed here too where they are NaN. So a row is NaN itself
        only where it is alone, and nothing has been in the cells before.
        """
        is_alone = self.is_spoilt and len(tokens.num_new) == 1
        if self.is_spoilt:
            self.clear()
        self.is_spoilt = True
        rows = self._apart(len(tokens.num_new), len(tokens.values))
        try:
            logits = self._context.compute(*tokens.of(rows))
        finally:
            self._undo(rows, [0] * len(rows))
            self.is_spoilt = False
        if logits.isnan().any():
            self.is_spoilt = True
            if not is_alone:
                return torch.cat([self._computed_apart(one) for one in tokens.rows()])
        return logits

    def clear(self) -> None:
        """Keep nothing any more, pinned contexts neither."""
        self.tree.clear()
        self._sequences.clear()
        self._context.clear()
        self.is_spoilt = False

    def _kept(self, batch: PackedBatch) -> NDArray[np.int64]:
        """Return the sequences in which rows go on, and have them hold what the rows have."""
        tree, sequences = self.tree, self._sequences
        if tree.now != self._settled:  # with the first pass of a batch, whose slots others had
            self._settled = tree.now
            self._settle()
            slots = tree.nodes.slot[: tree.nodes.num_made]
            linked = tree.nodes.slot[tree.nodes.table[tree.nodes.table > 0]]
            self._context.do(sequences.release(np.setdiff1d(slots[slots > 0], linked)))
        self._context.do(sequences.release(batch.new_slots.numpy()))
        past = batch.past
        rows, steps = sequences.place(past.slot[past.nodes], batch.num_past)
        self._context.do(steps)
        return rows

    def _settle(self) -> None:
        """Have sequences hold what the tree has found once the last batch was linked."""
        tree, nodes = self.tree, self.tree.nodes
        linked = nodes.table[nodes.table > 0]  # and none that this pass is to compute
        slots = nodes.slot[linked]
        is_known = np.zeros(tree.num_slots + 1, np.bool_)
        is_known[slots] = True

        def path_to(slot: int) -> NDArray[np.int32]:
            (node,) = linked[slots == slot]
            return nodes.slot[nodes.path(int(node))]

        self._context.do(self._sequences.settle(is_known, path_to))
        self._context.do(self._sequences.tidy())

    def _apart(self, num_rows: int, num_tokens: int) -> NDArray[np.int64]:
        """Return sequences that hold nothing, for contexts that are run whole."""
        self._settle()  # nothing of a batch is being filled here
        sequences = self._sequences
        missing = num_tokens - (self._context.size.num_cells - sequences.num_cells)
        if missing > 0:
            self._make_room(missing)
        nothing = np.zeros(num_rows, np.int64)
        rows, steps = sequences.place(nothing, nothing)
        self._context.do(steps)
        return rows

    def _make_room(self, num_cells: int) -> None:
        """Have fewer cells be held."""
        tree, sequences = self.tree, self._sequences
        most = sequences.num_cells - num_cells
        tree.begin()  # answers are made one by one here, and none goes on from another one
        while sequences.num_cells > most:
            slots = tree.nodes.slot[: tree.nodes.num_made]
            gone = np.setdiff1d(sequences.held(), slots)
            if len(gone):
                self._context.do(sequences.release(gone))
            elif not tree.evict(sequences.num_cells - most):
                raise EvaluationError(
                    f"llama.cpp has no room for {num_cells} tokens beside those that are pinned"
                )

    def _undo(self, rows: NDArray[np.int64], sizes: Sequence[int]) -> None:
        """Have sequences lose the tokens that have not become theirs."""
        self._context.do([Cut(*one) for one in zip(rows.tolist(), sizes, strict=True)])

    def running_states(self, layout: Any, before: Sequence[Any] | None) -> SequenceRowStates:
        """Return the running states of the rows of a pass, given the sequences that have them."""
        return SequenceRowStates(None if before is None else before[0])
