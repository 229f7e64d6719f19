"""Answering: the work of a model's worker thread on a batch, over an evaluator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar, final

import torch

from genlm_backend.checks import shown
from genlm_backend.errors import EvaluationError
from genlm_backend.model.adapters import AdapterNames
from genlm_backend.model.draw import Draw
from genlm_backend.model.drawing import Drawing
from genlm_backend.model.evaluator import Evaluator, EvaluatorCounts
from genlm_backend.model.query import Query
from genlm_backend.model.row import Row, alone, are_rows_of, rows_without
from genlm_backend.model.scoring import Answer, Question, weight
from genlm_backend.prefix import RowCache

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
        self._is_to_exclude = False

    def set_vocabulary(
        self, vocab_size: int, undefined_ids: Collection[int], *, are_omitted: bool = False
    ) -> None:
        """Say how wide rows are and which ids no token has, before anything is asked.

        Args:
            vocab_size: Width of the rows.
            undefined_ids: Ids that no token has.
            are_omitted: Whether the evaluator's rows are without them; see ``EvaluatorInfo``.
        """
        self._evaluator.undefined_ids = tuple(sorted(undefined_ids))
        self._is_to_exclude = bool(undefined_ids) and not are_omitted
        self._vocab_size = vocab_size
        self._undefined = torch.tensor(self._evaluator.undefined_ids, dtype=torch.int64)

    def weight(self, question: Question) -> float:
        """Return the weight of a question in a batch: 1, but for a text by its length."""
        return 1.0 if self.is_bounded or type(question) is Query else weight(question)

    def answers(self, questions: Sequence[Question]) -> list[Answer | Exception]:
        """Return one answer, or the error of those who asked, for each question of a batch."""
        # No variable here holds what the evaluator has answered: an error among it remembers this
        # frame, which must not know it in turn.
        generation = self._rows.generation
        refused = self._refused(questions)
        known = [q for q in questions if q not in refused] if refused else list(questions)
        if not known:
            return [refused[question] for question in questions]
        evaluate = partial(self._evaluator.evaluate, known)
        if not refused:
            return self._found(known, self.counted(evaluate), generation)
        answers = iter(self._found(known, self.counted(evaluate), generation))
        return [refused[q] if q in refused else next(answers) for q in questions]

    def _refused(self, questions: Sequence[Question]) -> dict[Question, Exception]:
        """Return the errors of questions whose adapter has gone."""
        if set(map(_ADAPTER, questions)) == {None}:
            return {}
        errors = {question: self._adapters.error_of(question) for question in questions}
        return {question: error for question, error in errors.items() if error is not None}

    def _found(
        self, questions: Sequence[Question], found: Any, generation: int
    ) -> list[Answer | Exception]:
        """Return the evaluator's answers, checked; keep the rows."""
        answers = self._checked(questions, found)
        if _types(questions) == {Query} and _types(answers) == {Row}:
            return self._kept(questions, answers, generation)
        pairs = enumerate(zip(questions, answers, strict=True))
        places = [i for i, (q, a) in pairs if isinstance(q, Query) and isinstance(a, Row)]
        rows = self._kept([questions[i] for i in places], [answers[i] for i in places], generation)
        for place, row in zip(places, rows, strict=True):
            answers[place] = row
        return answers

    def _kept(self, queries: Sequence[Any], rows: Sequence[Any], generation: int) -> list[Any]:
        """Return rows without ids that no token has, and put them where rows are kept."""
        if self._is_to_exclude:
            rows = rows_without(rows, self._undefined)
        if rows and self._rows.takes(rows[0].nbytes):
            # By plain tuples, which are equal and hold no pictures.
            self._rows.put_all(zip(map(tuple, queries), alone(rows), strict=True), generation)
        return list(rows)

    def defined(self, row: Row) -> Row:
        """Return the row given that some token comes: no id that none has."""
        return row.without(self._undefined) if len(self._undefined) else row

    def counted(self, verb: Callable[[], T]) -> T:
        """Return the result of a verb of the evaluator, and look at its counts."""
        try:
            return verb()
        finally:
            self.counts = self._evaluator.counts()

    def _checked(self, questions: Sequence[Question], found: Any) -> list[Answer | Exception]:
        """Return the evaluator's answers, with an error in place of what is no answer.

        Raises:
            EvaluationError: If there is not one answer for each question.
        """
        name = f"{type(self._evaluator).__name__}.evaluate"
        if not isinstance(found, Sequence) or len(found) != len(questions):
            what = f"{len(found)} answers" if isinstance(found, Sequence) else shown(found)
            raise EvaluationError(f"{name} returned {what} for {len(questions)} queries")
        are_rows = _types(questions) == {Query} and _types(found) == {Row}
        if are_rows and are_rows_of(found, self._vocab_size):
            return list(found)
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


_ADAPTER: Final = attrgetter("adapter")


def _types(values: Sequence[Any]) -> set[type]:
    return set(map(type, values))
