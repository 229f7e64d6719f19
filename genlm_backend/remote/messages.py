"""Messages between a model and its remote evaluator."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np

from genlm_backend.errors import EvaluationError
from genlm_backend.queries.evaluator import EvaluatorCounts

DROP: Final = "drop"
"""Method name of a message that cancels requests up to its number."""


Table: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
"""Rows, float32 ``[n, width]``."""

_NOTHING: Final = pickle.dumps(())


class Request(NamedTuple):
    """A call of an evaluator's method, with pickled arguments."""

    number: int
    method: str
    arguments: bytes = _NOTHING


class PackedError(NamedTuple):
    """A pickled error, its message and its traceback; ``error()`` restores its type if possible."""

    packed: bytes
    said: str
    where: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Pickle an error; one that cannot be pickled becomes an ``EvaluationError``."""
        kind, where = type(error), "".join(traceback.format_exception(error)).rstrip()
        said = f"{kind.__name__}: {error}"
        for value in (error, _Parts(kind, error.args, vars(error))):
            with contextlib.suppress(Exception):  # pickling may raise any exception
                packed = cls(pickle.dumps(value), said, where)
                if type(packed.error()) is kind:
                    return packed
        return cls(pickle.dumps(EvaluationError(said)), said, where)

    def error(self) -> BaseException:
        """Return the error, with its traceback in the other process as a note."""
        try:
            value = pickle.loads(self.packed)
            error = value.error() if isinstance(value, _Parts) else value
        except Exception:  # for example, its class cannot be imported here
            error = EvaluationError(self.said)
        error.add_note(f"Raised in the model's process:\n{self.where}")
        return error


class _Parts(NamedTuple):
    """The parts of an error whose constructor does not take the error's ``args``."""

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def error(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.arguments)
        vars(error).update(self.attributes)
        return error


class Reply(NamedTuple):
    number: int
    value: Any
    error: PackedError | None
    counts: EvaluatorCounts | None
    table: Table | None = None


class UnknownPictures(NamedTuple):
    """The reply to a call that was not made, since the receiver lacks pictures of the arguments."""


class RowRef(NamedTuple):
    """A stand-in for a row whose log-probabilities are in a table."""

    logsumexp: float | None


class PackedResults(NamedTuple):
    answers: list[Any]
    width: int
