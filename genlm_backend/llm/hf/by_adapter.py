"""Answers to a batch of questions of several adapters, of which a model has one in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast

from genlm_backend.errors import QueryDroppedError
from genlm_backend.llm.hf.job import Asked, Found
from genlm_backend.llm.query import Adapter
from genlm_backend.llm.scoring import Answer, Question


def answers_by_adapter(
    questions: Sequence[Question],
    in_place: Callable[[Adapter | None], AbstractContextManager[None]],
    answers_of: Callable[[list[Asked]], list[Found]],
) -> list[Answer | Exception]:
    """Return one answer to each question, or the error that the questions of its adapter meet.

    Args:
        questions: What is asked, of any adapters.
        in_place: Lets the model compute with an adapter, or as it came.
        answers_of: Answers questions of one adapter, while it is in place.

    Raises:
        QueryDroppedError: If nobody waits for any of them any more.
    """
    answers: dict[Question, Answer | Exception] = {}

    def answer(own: list[Asked]) -> None:
        try:
            with in_place(own[0].adapter):
                answers.update(zip(own, answers_of(own), strict=True))
        except QueryDroppedError:
            raise
        except Exception as error:  # raised for their callers, and no others
            answers.update(dict.fromkeys(own, error))

    for adapter in dict.fromkeys(question.adapter for question in questions):
        own = [q for q in cast(Sequence[Asked], questions) if q.adapter == adapter]
        answer(own)
        pictured = [q for q in own if q.context.pictures is not None]
        if len(own) > 1 and pictured and isinstance(answers[own[0]], Exception):
            # A model may refuse one context's pictures, which concerns nobody else.
            for part in ([q for q in own if q.context.pictures is None], *([q] for q in pictured)):
                if part:
                    answer(part)
    try:
        return [answers[question] for question in questions]
    finally:
        answers.clear()  # an error remembers this frame, which must not know it in turn
