"""Runner: the interface of a backend's forward passes."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from genlm_backend.attention.packing import PackedBatch, RowStates, Span


class Runner(abc.ABC):
    """Forward passes of one model: spans in, logits at the wanted positions out.

    Attributes:
        model: The model.
        num_forwards: Number of passes so far.
        tokens_computed: Number of tokens in them, padding not counted.
    """

    model: Any
    num_forwards: int
    tokens_computed: int

    @abc.abstractmethod
    def forward(self, spans: Sequence[Span] | PackedBatch, attend: Any) -> torch.Tensor:
        """Return the logits at the outputs of each span: ``[num_outputs, model_vocab]``.

        Args:
            spans: The spans, or what they have been packed to.
            attend: The way to attend.
        """

    @abc.abstractmethod
    def running_states(self, layout: Any, before: Sequence[Any] | None) -> RowStates:
        """Return the running states of the rows of a pass.

        Args:
            layout: Their tensors.
            before: States behind what the rows have, as a store reads them; ``None`` for rows that
                begin.
        """
