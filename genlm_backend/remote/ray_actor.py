"""EvaluatorActor: what an evaluator lives in on a Ray cluster."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from genlm_backend.errors import EvaluationError, ModelStateError, QueryDroppedError
from genlm_backend.model.evaluator import Evaluator, EvaluatorCounts
from genlm_backend.model.row import put
from genlm_backend.remote.answers import drawn_there, is_row, sendable
from genlm_backend.remote.arguments import Receiver
from genlm_backend.remote.messages import Answers, InTable, NotKnown, PackedError


class ActorReply(NamedTuple):
    """What a verb has returned or raised in an actor.

    Attributes:
        value: What was returned; ``None`` where it raised.
        error: What was raised, or ``None``.
        counts: What the evaluator has done so far; ``None`` where there is none.
        table: Rows, float32 ``[n, width]``; ``None`` where there are none.
    """

    value: Any
    error: PackedError | None
    counts: EvaluatorCounts | None
    table: np.ndarray[Any, np.dtype[np.float32]] | None


@final
class EvaluatorActor:
    """Makes an evaluator when it is told to, and carries out its verbs, one at a time.

    Ray runs ``ask`` on one thread and ``drop`` on another. An actor that Ray has restarted has no
    evaluator until it is opened again.
    """

    def __init__(self) -> None:
        self._evaluator: Evaluator | None = None
        self._receiver = Receiver()
        self._current = self._dropped = -1

    def ask(self, number: int, verb: str, arguments: bytes) -> ActorReply:
        """Carry out a verb with what it is given, pickled."""
        self._current = number
        if verb == "open":  # whoever asks begins anew
            self._receiver = Receiver()
        value, error, table = None, None, None
        try:
            if verb != "open" and self._evaluator is None:
                value = NOT_OPEN  # it knows nothing of what was sent to the one before it
            else:
                value, table = self._answer(verb, self._receiver.arguments(arguments))
        except Exception as raised:  # whatever it is, it is for whoever asked
            error = PackedError.of(raised)
        counts = None if self._evaluator is None else self._evaluator.counts()
        return ActorReply(value, error, counts, table)

    def drop(self, number: int) -> None:
        """Take note that nobody waits any more for the request of that number."""
        self._dropped = max(self._dropped, number)

    def _check_wanted(self) -> None:
        if self._dropped >= self._current:
            raise QueryDroppedError("ended before the query was answered")

    def _answer(self, verb: str, arguments: tuple[Any, ...] | None) -> tuple[Any, Any]:
        if arguments is None:
            return NotKnown(), None
        if verb == "open":
            return self._open(*arguments), None
        evaluator = self._evaluator
        assert evaluator is not None
        if verb == "undefined_ids":
            (evaluator.undefined_ids,) = arguments
            return None, None
        if verb == "evaluate":
            return _with_table(drawn_there(evaluator, *arguments))
        return getattr(evaluator, verb)(*arguments), None

    def _open(self, made_by: bytes, version: str) -> Any:
        own = library_version()
        if own != version:
            raise ModelStateError(
                f"genlm-backend {own} is installed where the replica is, and {version} here"
            )
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None
        evaluator = pickle.loads(made_by)()
        if not isinstance(evaluator, Evaluator):
            raise EvaluationError(f"an Evaluator must be made, got {type(evaluator)}")
        evaluator.check_wanted = self._check_wanted
        info = evaluator.open() if evaluator.info is None else evaluator.info
        self._evaluator = evaluator
        return info


NOT_OPEN = "not open"
"""What an actor answers that has been restarted and not opened since."""


def library_version() -> str:
    """Return the version of this library that is installed."""
    from importlib.metadata import version

    return version("genlm-backend")


def _with_table(found: Any) -> tuple[Any, Any]:
    """Return answers with their rows in a table beside them."""
    if not isinstance(found, Sequence):
        return found, None  # for whoever asked to refuse
    rows = [answer for answer in found if is_row(answer)]
    width = len(rows[0].logprobs) if rows else 0
    rows = [row for row in rows if len(row.logprobs) == width]
    in_table = {id(row) for row in rows}
    table = np.empty((len(rows), width), np.float32)
    for own, row in zip(table, rows, strict=True):
        put(row.logprobs, own)
    answers = [
        InTable(answer.normaliser) if id(answer) in in_table else sendable(answer)
        for answer in found
    ]
    return Answers(answers, width), table
