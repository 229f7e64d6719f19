"""What travels between a model here and its evaluator elsewhere."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import Any, Final, NamedTuple, Self

from genlm_backend.errors import EvaluationError
from genlm_backend.llm.evaluator import EvaluatorCounts

DROP: Final = "drop"
"""The verb that says that nobody waits for the request of that number any more."""


class Request(NamedTuple):
    """A verb of an evaluator and what it is given.

    Attributes:
        number: Number of the request; each is larger than the one before.
        verb: Name of the verb.
        arguments: Values that pickle.
    """

    number: int
    verb: str
    arguments: tuple[Any, ...] = ()


class PackedError(NamedTuple):
    """An error that arrives as what it is.

    Attributes:
        packed: The error, pickled, or a ``_Parts``.
        where: Its traceback.
    """

    packed: bytes
    where: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Pack an error. One that cannot be pickled is an ``EvaluationError`` with its message."""
        kind, where = type(error), "".join(traceback.format_exception(error)).rstrip()
        for value in (error, _Parts(kind, error.args, vars(error))):
            with contextlib.suppress(Exception):  # whatever an error's own way of pickling raises
                packed = cls(pickle.dumps(value), where)
                if type(packed.error()) is kind:
                    return packed
        return cls(pickle.dumps(EvaluationError(f"{kind.__name__}: {error}")), where)

    def error(self) -> BaseException:
        """Return the error, with a note of where it was raised."""
        value = pickle.loads(self.packed)
        error = value.error() if isinstance(value, _Parts) else value
        error.add_note(f"Raised where the model lives:\n{self.where}")
        return error


class _Parts(NamedTuple):
    """What an error is made of whose constructor takes something else than its arguments."""

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def error(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.arguments)
        vars(error).update(self.attributes)
        return error


class Reply(NamedTuple):
    """What a verb has returned or raised.

    Attributes:
        number: Number of the request.
        value: What was returned; ``None`` where it raised.
        error: What was raised, or ``None``.
        counts: What the evaluator has done so far.
    """

    number: int
    value: Any
    error: PackedError | None
    counts: EvaluatorCounts


class InTable(NamedTuple):
    """What stands for a row whose log-probabilities are in the shared table.

    Attributes:
        normaliser: The row's own.
    """

    normaliser: float | None


class Answers(NamedTuple):
    """The answers to a batch.

    Attributes:
        answers: One for each question: rows of ``width`` as ``InTable``, in the table's order, and
            exceptions as ``PackedError``.
        width: Number of log-probabilities of the rows that are in the table.
    """

    answers: list[Any]
    width: int
