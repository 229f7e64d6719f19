"""EvaluatorServer: runs an evaluator in a child process or actor, for a remote caller."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import torch

from genlm_backend.errors import (
    EngineDiedError,
    EvaluationError,
    ModelStateError,
    QueryDroppedError,
)
from genlm_backend.queries.evaluator import Evaluator, EvaluatorInfo
from genlm_backend.queries.query import Query
from genlm_backend.queries.row import Row
from genlm_backend.readouts.particle_step import StepResult
from genlm_backend.readouts.readout import answers_by_rows
from genlm_backend.remote.arguments import ArgumentDecoder
from genlm_backend.remote.messages import (
    PackedError,
    PackedResults,
    Reply,
    Request,
    RowRef,
    Table,
    UnknownPictures,
)

Carry: TypeAlias = Callable[[list[Row]], tuple[Table | None, list[Row]]]


@final
class EvaluatorServer:
    """Makes an evaluator at the request ``open``, and calls its methods one at a time."""

    def __init__(self, carry: Carry, told: type[BaseException] = Exception) -> None:
        self._carry, self._told = carry, told
        self._evaluator: Evaluator | None = None
        self._receiver = ArgumentDecoder()
        self._current = self._dropped = -1
        self._rows: list[Row] = []
        self._reads_out = self._omits_undefined = False

    def reply(self, request: Request) -> Reply:
        self._current = request.number
        value, error, table = None, None, None
        try:
            value = self._answer(request.method, request.arguments)
            if request.method in ("evaluate", "more") and self._rows:
                table, self._rows = self._carry(self._rows)
        except BaseException as raised:
            if not isinstance(raised, self._told):
                raise
            error = PackedError.of(raised)
        counts = None if self._evaluator is None else self._evaluator.counts()
        return Reply(request.number, value, error, counts, table)

    def drop(self, number: int) -> None:
        """Cancel all requests up to this number: no caller awaits them. Any thread may call it."""
        self._dropped = max(self._dropped, number)

    def _check_cancelled(self) -> None:
        if self._dropped >= self._current:
            raise QueryDroppedError("the evaluation ended before the query was answered")

    def _answer(self, method: str, packed: bytes) -> Any:
        if method == "open":  # the caller's new encoder has sent no pictures
            self._receiver = ArgumentDecoder()
        elif self._evaluator is None:  # a restarted actor has lost its evaluator
            raise EngineDiedError("Ray restarted the replica's actor, which has lost its model")
        arguments = self._receiver.arguments(packed)
        if arguments is None:
            return UnknownPictures()
        evaluator = self._evaluator
        if method == "open" or evaluator is None:
            return self._open(*arguments)
        if method == "more":
            return None
        if method == "undefined_ids":
            (evaluator.undefined_ids,) = arguments
            return None
        if method == "evaluate":
            self._rows = []
            return self._answers(evaluator, *arguments)
        return getattr(evaluator, method)(*arguments)

    def _open(self, made_by: bytes, version: str | None = None) -> EvaluatorInfo:
        own = version and library_version()
        if own != version:
            raise ModelStateError(
                f"the replica has genlm-backend {own} installed, and the caller has {version}: "
                "install the same version"
            )
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None
        try:
            make = pickle.loads(made_by)
        except Exception as error:
            raise EvaluationError(
                f"the model's process cannot import the code that loads the model ({error}): "
                "move definitions from a script or a notebook into a module"
            ) from error
        evaluator = make()
        if not isinstance(evaluator, Evaluator):
            raise EvaluationError(f"{make!r} must return an Evaluator, got {type(evaluator)}")
        evaluator.check_cancelled = self._check_cancelled
        self._evaluator = evaluator  # before open(): it must be closed even if open() raises
        info = evaluator.open() if evaluator.info is None else evaluator.info
        self._reads_out, self._omits_undefined = info.reads_out, info.omits_undefined
        return info

    def _answers(self, evaluator: Evaluator, queries: Sequence[Query]) -> Any:
        """Return the answers without their rows, which are sent separately."""
        if self._reads_out:
            found: Any = evaluator.evaluate(queries)
        else:
            undefined_ids = () if self._omits_undefined else evaluator.undefined_ids
            found = answers_by_rows(evaluator.evaluate, queries, undefined_ids)
        if not isinstance(found, Sequence) or len(found) != len(queries):
            return found  # the caller raises an error
        rows = [answer for answer in found if is_row(answer)]
        width = len(rows[0].logprobs) if rows else 0
        self._rows = [row for row in rows if len(row.logprobs) == width]
        in_table = {id(row) for row in self._rows}
        answers = [
            RowRef(answer.logsumexp) if id(answer) in in_table else sendable(answer)
            for answer in found
        ]
        return PackedResults(answers, width)


def library_version() -> str:
    from importlib.metadata import version

    return version("genlm-backend")


def is_row(answer: Any) -> bool:
    """Return whether an answer is a row that fits into a float32 table."""
    if not isinstance(answer, Row):
        return False
    row = answer.logprobs
    is_float = isinstance(row, torch.Tensor) and row.dtype is torch.float32
    return is_float and row.ndim == 1 and not row.requires_grad


def sendable(answer: Any) -> Any:
    """Return an answer as it is sent to the caller: tensors copied to the CPU, errors packed."""
    if isinstance(answer, torch.Tensor):  # scores: pickling a view would copy its whole storage
        return answer.detach().cpu().clone()
    if isinstance(answer, StepResult):
        return answer._replace(values=sendable(answer.values))
    return PackedError.of(answer) if isinstance(answer, BaseException) else answer
