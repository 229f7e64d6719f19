"""Answers to a batch of questions of several adapters, of which a model has one in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, cast

from genlm_backend.errors import QueryDroppedError
from genlm_backend.model.scoring import Answer, Question
from genlm_backend.passes.job import Asked, Found

_ADAPTER: Final = attrgetter("adapter")


def answers_by_adapter(
    questions: Sequence[Question], answers_of: Callable[[list[Asked]], list[Found]]
) -> list[Answer | Exception]:
    """Return one answer to each question, or the error that the questions of its adapter meet.

    Args:
        questions: What is asked, of any adapters.
        answers_of: Answers questions of one adapter, which it puts in place.

    Raises:
        QueryDroppedError: If nobody waits for any of them any more.
    """
    asked = cast(Sequence[Asked], questions)
    if len(set(map(_ADAPTER, asked))) == 1:  # as a rule
        return _of_one(list(asked), answers_of)
    places: defaultdict[Any, list[int]] = defaultdict(list)
    for place, question in enumerate(asked):
        places[question.adapter].append(place)
    return _in_parts(asked, places.values(), answers_of)


def _of_one(
    questions: list[Asked], answers_of: Callable[[list[Asked]], list[Found]]
) -> list[Answer | Exception]:
    """Return the answers to questions of one adapter, or the error that they meet."""
    try:
        return list(answers_of(questions))
    except QueryDroppedError:
        raise
    except Exception as error:  # raised for their callers, and no others
        pictured = [i for i, q in enumerate(questions) if q.context.pictures is not None]
        if len(questions) == 1 or not pictured:
            return [error] * len(questions)
    # A model may refuse one context's pictures, which concerns nobody else.
    others = [i for i, q in enumerate(questions) if q.context.pictures is None]
    return _in_parts(questions, [others, *([i] for i in pictured)], answers_of)


def _in_parts(
    questions: Sequence[Asked],
    parts: Iterable[list[int]],
    answers_of: Callable[[list[Asked]], list[Found]],
) -> list[Answer | Exception]:
    """Return the answers to questions of one adapter each, given their places part by part."""
    answers: dict[int, Answer | Exception] = {}
    try:
        for part in filter(None, parts):
            answers.update(
                zip(part, _of_one([questions[i] for i in part], answers_of), strict=True)
            )
        return [answers[i] for i in range(len(questions))]
    finally:
        answers.clear()  # an error remembers this frame, which must not know it in turn
