"""MlxRunner: calls an mlx-lm model on batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import mlx.core as mx
import numpy as np
import torch

from genlm_backend.attention.forward_batch import ForwardBatch, Runner
from genlm_backend.backends.mlx.mlx_batch_states import MlxBatchStates
from genlm_backend.backends.mlx.mlx_gather import MlxAttention, keep_new
from genlm_backend.errors import ModelStateError
from genlm_backend.prefix.state_cache import StateLayout


@final
class MlxRunner(Runner):
    """Runs forward passes of one model, and returns the logits at each batch's outputs."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, batch: ForwardBatch, attention: MlxAttention) -> torch.Tensor:
        """Return the logits at a batch's outputs, on the CPU: float32 ``[num_outputs, vocab]``."""
        if self.model.training:
            raise ModelStateError(
                "the model is in training mode, so its rows may be random: call eval() on it first"
            )
        picked = _Picked(batch.input_ids.shape, batch.output_rows, batch.output_columns)
        with (
            attention.forward_context(batch, self.model) as layers,
            picked.before_projection(self.model),
        ):
            logits = self.model(mx.array(batch.input_ids.numpy()), cache=layers)
        logits = logits[0] if picked.is_done else picked.of(logits)
        logits = logits.astype(mx.float32)
        states = batch.states
        mx.eval(logits, [] if states is None else states.behind(np.arange(batch.num_rows)))
        keep_new(batch, layers)
        self.num_forwards += 1
        self.tokens_computed += batch.num_new_tokens
        return torch.from_numpy(np.array(logits))[: len(batch.output_rows)]

    def running_states(
        self, layout: StateLayout, before: Sequence[mx.array] | None
    ) -> MlxBatchStates:
        return MlxBatchStates(layout, before)


@final
class _Picked:
    """The positions of a pass at which logits are wanted."""

    # A prompt's logits at every position would be large, so hidden states are picked before the
    # projection onto the vocabulary, if one is found.
    def __init__(self, shape: Sequence[int], rows: torch.Tensor, columns: torch.Tensor) -> None:
        self._shape = tuple(shape)
        # If no logits are wanted, pick one position: some matrix products do not accept zero rows.
        places = [part.numpy() if len(part) else np.zeros(1, np.int64) for part in (rows, columns)]
        self._rows, self._columns = map(mx.array, places)
        self.is_done = False

    def of(self, states: mx.array) -> mx.array:
        """Pick ``[num_outputs, …]`` out of ``[B, Q, …]``."""
        return states[self._rows, self._columns]

    def _before(self, states: mx.array) -> mx.array:
        if tuple(states.shape[:2]) != self._shape:
            return states
        self.is_done = True
        return self.of(states)[None]

    @contextlib.contextmanager
    def before_projection(self, model: Any) -> Iterator[None]:
        """Pass only the picked states to the model's projection onto the vocabulary."""
        head, name = _projection(model)
        if head is None:
            yield
            return
        kind, before = type(head), self._before

        def project(module: Any, states: mx.array) -> mx.array:
            return getattr(kind, name)(module, before(states))

        head.__class__ = type(kind.__name__, (kind,), {name: project})
        try:
            yield
        finally:
            head.__class__ = kind


def _projection(model: Any) -> tuple[Any, str]:
    """Return the module that projects onto the vocabulary, if any, and its method's name."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name.rpartition(".")[2] == "lm_head":
            return module, "__call__"
    tables = {name: module for name, module in modules.items() if hasattr(module, "as_linear")}
    for name in list(tables):  # a table of an adapter contains one of the model
        if any(name.startswith(f"{other}.") for other in tables):
            del tables[name]
    return max(tables.values(), key=_num_rows, default=None), "as_linear"


def _num_rows(table: Any) -> int:
    """Return how many tokens an embedding table has."""
    own = table if hasattr(table, "weight") else table.embedding
    return own.weight.shape[0]
