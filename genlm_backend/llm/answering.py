"""Answering: what a model's worker thread does with a batch, over an evaluator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar, final

import torch

from genlm_backend.cache import RowCache
from genlm_backend.checks import shown
from genlm_backend.errors import EvaluationError
from genlm_backend.llm.adapters import AdapterNames
from genlm_backend.llm.draw import Draw
from genlm_backend.llm.drawing import Drawing
from genlm_backend.llm.evaluator import Evaluator, EvaluatorCounts
from genlm_backend.llm.query import Query
from genlm_backend.llm.row import Row
from genlm_backend.llm.scoring import Answer, Question, weight

T = TypeVar("T")


@final
class Answering:
    """Answers of an evaluator: checked, without ids that no token has, and rows kept.

    Args:
        evaluator: What answers.
        rows: Where rows are kept.
        adapters: The adapters that are loaded.

    Attributes:
        counts: What the evaluator had done when it last came back.
        is_bounded: Whether the evaluator takes so many questions at most, whatever they are.
    """

    def __init__(self, evaluator: Evaluator, rows: RowCache[Row], adapters: AdapterNames) -> None:
        self.counts, self.is_bounded = EvaluatorCounts(), True
        self._evaluator, self._rows, self._adapters = evaluator, rows, adapters
        self._vocab_size = 0
        self._undefined = torch.empty(0, dtype=torch.int64)

    def set_vocabulary(self, vocab_size: int, undefined_ids: Collection[int]) -> None:
        """Say how wide rows are and which ids no token has, before anything is asked."""
        self._evaluator.undefined_ids = tuple(sorted(undefined_ids))
        self._vocab_size = vocab_size
        self._undefined = torch.tensor(self._evaluator.undefined_ids, dtype=torch.int64)

    def weight(self, question: Question) -> float:
        """Return what a question counts for in a batch: 1, but for a text by its length."""
        return 1.0 if self.is_bounded else weight(question)

    def answers(self, questions: Sequence[Question]) -> list[Answer | Exception]:
        """Return one answer, or the error of those who asked, for each question of a batch."""
        generation = self._rows.generation
        answers: dict[Question, Answer | Exception] = {
            question: error
            for question in questions
            if question.adapter is not None and (error := self._adapters.error_of(question))
        }
        known = [question for question in questions if question not in answers]
        try:
            if known:
                evaluate = partial(self._evaluator.evaluate, known)
                answers.update(self._found(known, self.counted(evaluate), generation))
            return [answers[question] for question in questions]
        finally:
            answers.clear()  # an error remembers this frame, which must not know it in turn

    def _found(
        self, questions: Sequence[Question], found: Any, generation: int
    ) -> dict[Question, Answer | Exception]:
        answers: dict[Question, Answer | Exception] = {}
        for question, answer in zip(questions, self._checked(questions, found), strict=True):
            if isinstance(question, Query) and isinstance(answer, Row):
                answer = self.defined(answer)
                if self._rows.takes(answer.nbytes):
                    # As a plain tuple, which is equal and holds no pictures.
                    self._rows.put(tuple(question), answer.alone(), generation)
            answers[question] = answer
        return answers

    def defined(self, row: Row) -> Row:
        """Return the row given that some token comes: no id that none has."""
        return row.without(self._undefined) if len(self._undefined) else row

    def counted(self, verb: Callable[[], T]) -> T:
        """Return what a verb of the evaluator returns, and look at what it has counted."""
        try:
            return verb()
        finally:
            self.counts = self._evaluator.counts()

    def _checked(self, questions: Sequence[Question], found: Any) -> list[Answer | Exception]:
        """Return what the evaluator has answered, with an error in place of what is no answer.

        Raises:
            EvaluationError: If there is not one answer for each question.
        """
        name = f"{type(self._evaluator).__name__}.evaluate"
        if not isinstance(found, Sequence) or len(found) != len(questions):
            what = f"{len(found)} answers" if isinstance(found, Sequence) else shown(found)
            raise EvaluationError(f"{name} returned {what} for {len(questions)} queries")
        return [
            answer
            if isinstance(answer, Exception) or self._is_answer(question, answer)
            else EvaluationError(
                f"{name} must return {self._wanted(question)}, or an exception, got {shown(answer)}"
            )
            for question, answer in zip(questions, found, strict=True)
        ]

    def _is_answer(self, question: Question, answer: Any) -> bool:
        if isinstance(question, Query):
            return isinstance(answer, Row) and answer.is_of(self._vocab_size)
        if isinstance(question, Drawing) and isinstance(answer, Draw):
            return question.is_answered_by(answer) and answer.token_id < self._vocab_size
        return question.is_answered_by(answer)

    def _wanted(self, question: Question) -> str:
        if isinstance(question, Query):
            return f"a Row of float32 [{self._vocab_size}] for each query"
        if isinstance(question, Drawing):
            return "a Draw for a drawing"
        return f"a tensor of float32 [{question.num_targets}] for a scoring of so many tokens"
