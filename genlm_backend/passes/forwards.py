"""Forwards: the calls of a model, and the rows and scores made of their logits."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from genlm_backend.attention.packing import PackedBatch, RowStates, Span, pack
from genlm_backend.attention.paths import Paths
from genlm_backend.model.row import Row, stacked
from genlm_backend.model.scoring import NOTHING, Beside, numbers_of_rows
from genlm_backend.passes.job import Job
from genlm_backend.passes.prefill_plan import Segment
from genlm_backend.prefix import Nodes


class Runner(abc.ABC):
    """Forward passes of one model: spans in, logits at the wanted positions out."""

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
            before: States after the cached tokens, as a store reads them; ``None`` for rows that
                begin.
        """


@final
class Forwards:
    """Calls of a runner, whose logits become rows and scores."""

    def __init__(
        self,
        runner: Runner,
        finish: Callable[[torch.Tensor], list[Row]],
        score: Callable[[torch.Tensor, list[int], list[int]], torch.Tensor],
        check_wanted: Callable[[], None],
    ) -> None:
        self.runner, self.finish, self.check_wanted = runner, finish, check_wanted
        self._score = score

    def of_segments(
        self, segments: Sequence[Segment], nodes: Nodes, states: RowStates | None, attend: Any
    ) -> None:
        """Run segments in one pass, and hand its outputs to the jobs that want them."""
        spans = [segment.span(nodes.slot[segment.nodes]) for segment in segments]
        before = np.array([segment.before for segment in segments], np.int32)
        logits = self.runner.forward(pack(spans, Paths.of(nodes, before), states), attend)
        wanted = [jobs for segment in segments for jobs in segment.outputs.values()]
        if any(job.targets for jobs in wanted for job in jobs):
            self._hand_out_scores(segments, logits)
        indices = [i for i, jobs in enumerate(wanted) if not all(job.targets for job in jobs)]
        if indices:
            rows = self.finish(logits if len(indices) == len(wanted) else logits[indices])
            for i, row in zip(indices, rows, strict=True):
                for job in wanted[i]:
                    job.row = None if job.targets else row

    def alone(self, job: Job, span: Span, attend: Any, start: int = 0) -> None:
        """Run tokens of one context in a pass of their own, and hand the job its outputs."""
        self.check_wanted()
        logits = self.runner.forward([span], attend)
        if not job.targets:
            job.row = next(iter(self.finish(logits)), None) if len(span.outputs) else None
            return
        wanted = [start + position - job.first for position in span.outputs]
        if wanted:
            self._put_scores(logits, [(row, job, i) for row, i in enumerate(wanted)])

    def _hand_out_scores(self, segments: Sequence[Segment], logits: torch.Tensor) -> None:
        outputs = [output for segment in segments for output in segment.outputs.items()]
        wanted = [
            (index, job, position - job.first)
            for index, (position, jobs) in enumerate(outputs)
            for job in jobs
            if job.targets
        ]
        indices = sorted({index for index, _, _ in wanted})
        if len(indices) < len(outputs):
            logits = logits[indices]
        rows = {index: row for row, index in enumerate(indices)}
        self._put_scores(logits, [(rows[index], job, i) for index, job, i in wanted])

    def _put_scores(self, logits: torch.Tensor, wanted: Sequence[tuple[int, Job, int]]) -> None:
        """Put the scores of targets into their jobs."""
        kinds: defaultdict[Beside, list[tuple[int, Job, int]]] = defaultdict(list)
        for one in wanted:
            kinds[one[1].beside].append(one)
        for beside, own in kinds.items():
            rows, targets = [row for row, _, _ in own], [job.targets[i] for _, job, i in own]
            if beside == NOTHING:
                scores = self._score(logits, rows, targets)[:, None].double()
            else:
                table = stacked(self.finish(logits[rows]))
                scores = numbers_of_rows(table, targets, beside)
            for (_, job, i), score in zip(own, scores.cpu().numpy(), strict=True):
                job.scores[i] = score
