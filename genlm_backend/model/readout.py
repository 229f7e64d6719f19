"""Readout: a few numbers read off the row behind a context, where the model is."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from genlm_backend.errors import EvaluationError
from genlm_backend.model.context import Context
from genlm_backend.model.query import Adapter, Query
from genlm_backend.model.row import Row, rows_without, stacked

if TYPE_CHECKING:
    from genlm_backend.model.scoring import Question


class Readout(abc.ABC):
    """A question whose answer is a function of the row behind a context.

    It is asked in the batches of other questions, and answered where the row is: on the device of
    the model, and in its process, so that only the answer travels. A kind of readouts is one class,
    of values that pickle, and that are equal where their answers are.

    Attributes:
        query: The context, and the adapter to read it with.
        wanted: The answer, as errors say it.
        targets: No tokens: no text is scored.
        weight: How much it counts for in a batch.
    """

    __slots__ = ()

    query: Query
    wanted: ClassVar[str]
    targets: ClassVar[tuple[int, ...]] = ()
    weight: ClassVar[float] = 1.0

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to read the context with, or ``None`` for the base model."""
        return self.query.adapter

    @property
    def context(self) -> Context:
        """The tokens that the model has to read."""
        return self.query.context

    @classmethod
    @abc.abstractmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        """Return the answers to readouts of this kind.

        Args:
            readouts: One or more of them.
            rows: The log-probabilities of the row of each, normalised, on any device: float32
                ``[n, vocab]``. They may be others' too, and are not modified.

        Returns:
            An answer for each, on the processor, or the exception for whoever asked it.
        """

    @abc.abstractmethod
    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` is one to this question, of a vocabulary of that size."""

    def of_logprobs(self, logprobs: torch.Tensor) -> Any:
        """Return the answer, given the row's log-probabilities; see ``of_row``."""
        return self.of_row(Row(logprobs.float()))

    def of_row(self, row: Row) -> Any:
        """Return the answer, given the context's row.

        Raises:
            EvaluationError: (``RuntimeError``) If the row is NaN.
            Exception: What the kind has in place of an answer.
        """
        (answer,) = read_off([self], [row])
        if isinstance(answer, Exception):
            raise answer
        return answer


def answers_by_rows(
    evaluate: Callable[[Sequence[Question]], Any],
    questions: Sequence[Question],
    undefined_ids: Sequence[int] = (),
) -> Any:
    """Return answers to questions, among them readouts, by an evaluator that knows no readouts.

    Args:
        evaluate: Returns answers to distinct questions without readouts, as an ``Evaluator``.
        questions: The questions.
        undefined_ids: Ids that no token has, and that its rows do not leave out by themselves.

    Returns:
        The answers; where it returned something else than one for each question, that.
    """
    if not any(issubclass(kind, Readout) for kind in set(map(type, questions))):
        return evaluate(questions)
    asked = [q.query if isinstance(q, Readout) else q for q in questions]
    distinct = list(dict.fromkeys(asked))
    found = evaluate(distinct)
    if not isinstance(found, Sequence) or len(found) != len(distinct):
        return found  # for whoever asked to refuse
    answer_to = dict(zip(distinct, found, strict=True))
    answers = [answer_to[own] for own in asked]
    try:
        places = [i for i, q in enumerate(questions) if isinstance(q, Readout)]
        places = [i for i in places if isinstance(answers[i], Row)]
        rows = [answers[i] for i in places]
        if undefined_ids and rows:
            rows = rows_without(rows, torch.tensor(undefined_ids, dtype=torch.int64))
        for i, answer in zip(places, read_off([questions[i] for i in places], rows), strict=True):
            answers[i] = answer
        return answers
    finally:  # an error remembers this frame, which must not know it in turn
        answer = None
        del found, answer_to, answers


@torch.inference_mode()
def read_off(readouts: Sequence[Any], rows: Sequence[Row]) -> list[Any]:
    """Return the answer to each readout, given its row, or the exception for whoever asked it."""
    answers: list[Any] = [None] * len(readouts)
    kinds: defaultdict[type[Readout], list[int]] = defaultdict(list)
    for i, (readout, row) in enumerate(zip(readouts, rows, strict=True)):
        if row.is_nan:
            answers[i] = EvaluationError("the model says NaN of what comes next here")
        else:
            kinds[type(readout)].append(i)
    for kind, of_kind in kinds.items():
        for start in range(0, len(of_kind), MANY_ROWS):
            places = of_kind[start : start + MANY_ROWS]
            table = stacked([rows[i] for i in places])
            found = kind.of_rows([readouts[i] for i in places], table)
            for i, answer in zip(places, found, strict=True):
                answers[i] = answer
    return answers


MANY_ROWS: Final = 128
"""Rows that are read off at once: a table of 64 MB, of 131,072 tokens. One may be there often."""
