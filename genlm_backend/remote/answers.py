"""Answers of an evaluator, got ready for whoever asked from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genlm_backend.errors import EvaluationError
from genlm_backend.model.drawing import Drawing
from genlm_backend.model.evaluator import Evaluator
from genlm_backend.model.row import Row
from genlm_backend.model.scoring import Question
from genlm_backend.remote.messages import PackedError


def drawn_there(evaluator: Evaluator, questions: Sequence[Question]) -> Any:
    """Return what an evaluator answers; a ``Drawing`` by a row, where it answers none itself."""
    if not any(isinstance(question, Drawing) for question in questions):
        return evaluator.evaluate(questions)
    asked = [q.query if isinstance(q, Drawing) else q for q in questions]
    distinct = list(dict.fromkeys(asked))
    found = evaluator.evaluate(distinct)
    if not isinstance(found, Sequence) or len(found) != len(distinct):
        return found  # for the parent process to refuse
    answers = dict(zip(distinct, found, strict=True))
    return [
        _drawn(question, answers[own], evaluator.undefined_ids)
        if isinstance(question, Drawing)
        else answers[own]
        for question, own in zip(questions, asked, strict=True)
    ]


def _drawn(drawing: Drawing, answer: Any, undefined_ids: Sequence[int]) -> Any:
    if not is_row(answer):
        return answer
    if undefined_ids:
        ids = torch.tensor(undefined_ids, dtype=torch.int64)
        answer = Row(answer.logprobs.cpu(), answer.normaliser).without(ids)
    try:
        return drawing.of_row(answer)
    except EvaluationError as error:
        return error


def is_row(answer: Any) -> bool:
    """Return whether an answer is a row that a table can take."""
    if not isinstance(answer, Row):
        return False
    row = answer.logprobs
    is_float = isinstance(row, torch.Tensor) and row.dtype is torch.float32
    return is_float and row.ndim == 1 and not row.requires_grad


def sendable(answer: Any) -> Any:
    """Return an answer that is not in the table, as it is to be pickled."""
    if isinstance(answer, torch.Tensor):  # scores: a view would take what it is of along
        return answer.detach().cpu().clone()
    return PackedError.of(answer) if isinstance(answer, BaseException) else answer
