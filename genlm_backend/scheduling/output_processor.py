"""OutputProcessor: makes rows and scores from the logits of a pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import torch

from genlm_backend.queries.row import (
    Row,
    fill_undefined,
    log_softmax,
    rows_of_logits,
    scores_of_logits,
    stacked,
)
from genlm_backend.readouts.score_query import NO_EXTRAS, ScoreExtras, numbers_of_rows
from genlm_backend.scheduling.prefill_plan import ScheduledQuery

_Output: TypeAlias = tuple[int, ScheduledQuery, int]
"""Index of a row of logits, a query that needs the row, and the position it follows."""


@final
class OutputProcessor:
    """Makes rows and scores from logits; rows go to ``device`` (``None``: the logits' device)."""

    def __init__(
        self, undefined_ids: Callable[[], tuple[int, ...]], device: torch.device | None = None
    ) -> None:
        self._undefined_ids, self.device = undefined_ids, device

    @torch.inference_mode()  # the logits are inference tensors, and may be overwritten
    def table(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 log-probabilities ``[num_outputs, model_vocab]``; may overwrite logits."""
        return log_softmax(logits, self._undefined_ids(), in_place=True)[0]

    @torch.inference_mode()
    def defined(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits of ids without a token to ``-inf``, in place; return them as float32."""
        return fill_undefined(logits, self._undefined_ids(), in_place=True).float()

    @torch.inference_mode()
    def rows(self, logits: torch.Tensor) -> list[Row]:
        """Return a ``Row`` per row of logits ``[num_outputs, model_vocab]``; may overwrite them."""
        return rows_of_logits(logits, self.device, self._undefined_ids(), in_place=True)

    def hand_out(self, logits: torch.Tensor, wanted: Sequence[_Output]) -> None:
        """Store a pass's results in its queries; scores first, as rows may overwrite the logits."""
        scored = [(index, job, at - job.first) for index, job, at in wanted if job.targets]
        if scored:
            indices = sorted({index for index, _, _ in scored})
            of_scores = logits if len(indices) == len(logits) else logits[indices]
            row_of = {index: row for row, index in enumerate(indices)}
            self._put_scores(of_scores, [(row_of[index], job, i) for index, job, i in scored])
        indices = sorted({index for index, job, _ in wanted if not job.targets})
        if indices:
            own = self.rows(logits if len(indices) == len(logits) else logits[indices])
            rows = dict(zip(indices, own, strict=True))
            for index, job, _ in wanted:
                if not job.targets:
                    job.row = rows[index]

    def _put_scores(self, logits: torch.Tensor, wanted: Sequence[_Output]) -> None:
        """Compute and store scores; in ``wanted``, target indices take the place of positions."""
        kinds: defaultdict[ScoreExtras, list[_Output]] = defaultdict(list)
        for one in wanted:
            kinds[one[1].beside].append(one)
        for beside, own in kinds.items():
            rows, targets = [row for row, _, _ in own], [job.targets[i] for _, job, i in own]
            if beside == NO_EXTRAS:
                scores = scores_of_logits(logits, rows, targets, self._undefined_ids())
                scores = scores[:, None].double()
            else:
                scores = numbers_of_rows(stacked(self.rows(logits[rows])), targets, beside)
            for (_, job, i), score in zip(own, scores.cpu().numpy(), strict=True):
                job.scores[i] = score
