"""Forwards: the calls of a model, and the rows and scores made of their logits."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch

from genlm_backend.attention.cascade_plan import CachedPrefixes
from genlm_backend.attention.forward_batch import BatchStates, ForwardBatch, TokenChunk, pack
from genlm_backend.prefix.nodes import Nodes
from genlm_backend.queries.row import Row, stacked
from genlm_backend.readouts.score_query import NO_EXTRAS, ScoreExtras, numbers_of_rows
from genlm_backend.scheduling.prefill_plan import PrefillChunk, ScheduledQuery


class Runner(abc.ABC):
    """Forward passes of one model: chunks in, logits at the wanted positions out."""

    model: Any
    num_forwards: int
    tokens_computed: int

    @abc.abstractmethod
    def forward(self, chunks: Sequence[TokenChunk] | ForwardBatch, attention: Any) -> torch.Tensor:
        """Return the logits at the outputs of each chunk: ``[num_outputs, model_vocab]``.

        Args:
            chunks: The chunks, or what they have been packed to.
            attention: The backend of attention.
        """

    @abc.abstractmethod
    def running_states(self, layout: Any, before: Sequence[Any] | None) -> BatchStates:
        """Return the recurrent states of the rows of a pass.

        Args:
            layout: Their tensors.
            before: States after the cached tokens, as a pool reads them; ``None`` for rows that
                begin.
        """


_Output: TypeAlias = tuple[int, ScheduledQuery, int]
"""The index of some logits, the query that wants them, and the position that they follow."""


@final
class Forwards:
    """Calls of a runner, whose logits become rows and scores."""

    def __init__(
        self,
        runner: Runner,
        finish: Callable[[torch.Tensor], list[Row]],
        score: Callable[[torch.Tensor, list[int], list[int]], torch.Tensor],
        check_cancelled: Callable[[], None],
    ) -> None:
        self.runner, self.finish, self.check_cancelled = runner, finish, check_cancelled
        self._score = score

    def of_chunks(
        self,
        chunks: Sequence[PrefillChunk],
        nodes: Nodes,
        states: BatchStates | None,
        attention: Any,
    ) -> None:
        """Run chunks in one pass, and hand its outputs to the jobs that want them."""
        token_chunks = [chunk.token_chunk(nodes.slot[chunk.nodes]) for chunk in chunks]
        before = np.array([chunk.before for chunk in chunks], np.int32)
        logits = self.runner.forward(
            pack(token_chunks, CachedPrefixes.of(nodes, before), states), attention
        )
        outputs = (output for chunk in chunks for output in chunk.outputs.items())
        wanted = [
            (index, job, position) for index, (position, jobs) in enumerate(outputs) for job in jobs
        ]
        self._hand_out(logits, wanted)

    def alone(
        self, job: ScheduledQuery, token_chunk: TokenChunk, attention: Any, start: int = 0
    ) -> None:
        """Run tokens of one context in a pass of their own, and hand the job its outputs."""
        self.check_cancelled()
        logits = self.runner.forward([token_chunk], attention)
        wanted = [(row, job, start + position) for row, position in enumerate(token_chunk.outputs)]
        self._hand_out(logits, wanted)

    def _hand_out(self, logits: torch.Tensor, wanted: Sequence[_Output]) -> None:
        """Give jobs what is made of the logits after positions: scores first, and then rows."""
        scored = [(index, job, at - job.first) for index, job, at in wanted if job.targets]
        if scored:
            indices = sorted({index for index, _, _ in scored})
            of_scores = logits if len(indices) == len(logits) else logits[indices]
            row_of = {index: row for row, index in enumerate(indices)}
            self._put_scores(of_scores, [(row_of[index], job, i) for index, job, i in scored])
        indices = sorted({index for index, job, _ in wanted if not job.targets})
        if indices:
            own = self.finish(logits if len(indices) == len(logits) else logits[indices])
            rows = dict(zip(indices, own, strict=True))
            for index, job, _ in wanted:
                if not job.targets:
                    job.row = rows[index]

    def _put_scores(self, logits: torch.Tensor, wanted: Sequence[_Output]) -> None:
        """Put the scores of targets into their jobs."""
        kinds: defaultdict[ScoreExtras, list[_Output]] = defaultdict(list)
        for one in wanted:
            kinds[one[1].beside].append(one)
        for beside, own in kinds.items():
            rows, targets = [row for row, _, _ in own], [job.targets[i] for _, job, i in own]
            if beside == NO_EXTRAS:
                scores = self._score(logits, rows, targets)[:, None].double()
            else:
                table = stacked(self.finish(logits[rows]))
                scores = numbers_of_rows(table, targets, beside)
            for (_, job, i), score in zip(own, scores.cpu().numpy(), strict=True):
                job.scores[i] = score
