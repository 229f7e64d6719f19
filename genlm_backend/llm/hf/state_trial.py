"""Passes of a trial that go on from running states, whatever slots there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from genlm_backend.cache import KVLayout
from genlm_backend.llm.hf.attend import Attend, RunningStates
from genlm_backend.llm.hf.packing import Run, Span, pack
from genlm_backend.llm.hf.runner import Runner


@final
@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """The first tokens of a context, which have gone through the model.

    Attributes:
        past: The slots of their keys and values.
        states: The running states behind them, ``[1, *shape]`` each.
    """

    past: tuple[Run, ...]
    states: list[torch.Tensor]


@final
class StateTrial:
    """Passes of a model with running states, whose rows have as many new tokens each.

    Args:
        runner: What calls the model.
        layout: What is kept of a context.
        attend: The way to attend to keys and values.
    """

    def __init__(self, runner: Runner, layout: KVLayout, attend: Attend) -> None:
        self._runner, self._layout, self._attend = runner, layout, attend
        self._num_slots = 0

    def spans(self, before: Sequence[Begun | None], tokens: Sequence[list[int]]) -> list[Span]:
        """Return spans of the next tokens of contexts, with slots of their own."""
        spans: list[Span] = []
        for begun, ids in zip(before, tokens, strict=True):
            first = self._num_slots + 1
            self._num_slots += len(ids)
            past = () if begun is None else begun.past
            spans.append(Span(ids, past, range(first, first + len(ids)), (len(ids) - 1,)))
        return spans

    def go_on(
        self, before: Sequence[Begun | None], tokens: Sequence[list[int]]
    ) -> tuple[list[Begun], torch.Tensor]:
        """Run the next tokens of contexts, all of which begin or none.

        Returns:
            The contexts with these tokens, and the logits behind the last ones.
        """
        spans = self.spans(before, tokens)
        states = RunningStates(self._layout.states, joined(before))
        logits = self._runner.forward(pack(spans, states=states), self._attend)
        behind = states.behind(np.arange(len(spans)))
        ends = [
            Begun(
                (*span.past, Run(object(), span.slots, span.num_new)),
                [state[i : i + 1].clone() for state in behind],
            )
            for i, span in enumerate(spans)
        ]
        return ends, logits


def joined(before: Sequence[Begun | None]) -> list[torch.Tensor] | None:
    """Return the running states of contexts, ``[B, *shape]`` each; ``None`` where they begin."""
    states = [begun.states for begun in before if begun is not None]
    return [torch.cat(rows) for rows in zip(*states, strict=True)] if states else None
