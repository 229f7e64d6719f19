"""Readout: a query whose answer is a function of a context's row."""

from __future__ import annotations

import abc
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, cast, final

import torch

from genlm_backend.batching.pending_query import presentable
from genlm_backend.checks import shown
from genlm_backend.errors import EvaluationError
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import Adapter, Query, RowQuery
from genlm_backend.queries.row import Row, rows_without, stacked
from genlm_backend.runtime.memory import is_out_of_memory, release_cached_memory


class Readout(Query):
    """A query whose answer is a function of a context's row.

    Readouts share batches with other queries, and are computed from rows on the rows' device. Each
    kind of readout is a class; equal instances must have equal answers. If the model runs in
    another process, only this library's readouts are sent to it. For other classes, that process
    sends the rows, and the caller's process computes the answers.

    Attributes:
        query: The context, and the adapter to read it with.
        modifies_rows: Whether ``of_rows`` may modify its rows; if so, it gets a copy.
    """

    __slots__ = ()

    query: RowQuery
    needs_row: ClassVar[bool] = True
    modifies_rows: ClassVar[bool] = True

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to read the context with, or ``None`` for the base model."""
        return self.query.adapter

    @property
    def context(self) -> Context:
        """The tokens that the model has to read."""
        return self.query.context

    @property
    def forward_key(self) -> RowQuery:
        """The query for the row: readouts of the same row share a forward pass."""
        return self.query

    @classmethod
    @abc.abstractmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        """Return the answers to readouts of this kind.

        Args:
            readouts: One or more instances of this class.
            rows: The normalised log-probabilities of each readout's row, on any device: float32
                ``[n, vocab]``. If ``modifies_rows`` is false, other code may read this memory.

        Returns:
            For each readout its answer, in CPU memory, or an exception for its callers. If the
            method raises, only the callers of these readouts get the error.
        """

    @abc.abstractmethod
    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` has the form of an answer to this query."""

    def of_logprobs(self, logprobs: torch.Tensor) -> Any:
        """Return the answer, given the row's log-probabilities; see ``of_row``."""
        return self.of_row(Row(logprobs.float()))

    def of_row(self, row: Row) -> Any:
        """Return the answer, given the context's row.

        Raises:
            EvaluationError: (``RuntimeError``) If the row has NaNs, or the answer has a wrong form.
            Exception: The exception that ``of_rows`` raises or returns for this readout.
        """
        (answer,) = read_off([self], [row])
        vocab_size = row.logprobs.shape[-1]
        if not isinstance(answer, Exception) and not self.is_answered_by(answer, vocab_size):
            wanted = self.wanted.format(vocab_size=vocab_size)
            answer = EvaluationError(f"the answer must be {wanted}, got {shown(answer)}")
        if isinstance(answer, Exception):
            raise answer
        return answer


def is_own(kind: type) -> bool:
    """Return whether a class of queries is user-defined: only the caller's process answers them."""
    return not kind.__module__.startswith(_PACKAGE)


def answers_by_rows(
    evaluate: Callable[[Sequence[Query]], Any],
    queries: Sequence[Query],
    undefined_ids: Sequence[int] = (),
    is_unknown: Callable[[Any], bool] = lambda kind: True,
) -> Any:
    """Answer queries by ``evaluate``, but readouts from rows if ``is_unknown(class)`` is true."""
    kinds = {kind for kind in set(map(type, queries)) if issubclass(kind, Readout)}
    kinds = {kind for kind in kinds if is_unknown(kind)}
    unknown = {i for i, q in enumerate(queries) if type(q) in kinds} if kinds else set[int]()
    if not unknown:
        return evaluate(queries)
    asked: list[Any] = [cast(Any, q).query if i in unknown else q for i, q in enumerate(queries)]
    distinct = list(dict.fromkeys(asked))
    found = evaluate(distinct)
    if not isinstance(found, Sequence) or len(found) != len(distinct):
        return found  # a wrong number of answers: the caller checks it and raises
    answer_to = dict(zip(distinct, found, strict=True))
    answers = [answer_to[own] for own in asked]
    indices = [i for i in sorted(unknown) if isinstance(answers[i], Row)]
    rows = [answers[i] for i in indices]
    if undefined_ids and rows:
        rows = rows_without(rows, torch.tensor(undefined_ids, dtype=torch.int64))
    for i, answer in zip(indices, read_off([queries[i] for i in indices], rows), strict=True):
        answers[i] = answer
    return answers


@final
class RowQueries(NamedTuple):
    """The queries to answer from each row, for the process that has the rows."""

    queries: Sequence[Sequence[Any]]
    undefined_ids: tuple[int, ...] = ()

    def of(self, indices: Sequence[int]) -> RowQueries:
        return RowQueries([self.queries[i] for i in indices], self.undefined_ids)

    @property
    def has_own(self) -> bool:
        return any(is_own(type(query)) for of_row in self.queries for query in of_row)

    def packed_answers(self, rows: Sequence[Row]) -> bytes:
        here = torch.device("cpu")
        answers = [
            [each.to(here) if isinstance(each, Row) else each for each in of_row]
            for of_row in self.answers(rows)
        ]
        return packed(answers)

    def answers(self, rows: Sequence[Row]) -> list[list[Any]]:
        """Return each row's answers, with an exception in place of an answer that failed."""
        answers: list[list[Any]] = [
            [row] * len(own) for row, own in zip(rows, self.queries, strict=True)
        ]
        pairs = [(i, k) for i, own in enumerate(self.queries) for k in range(len(own))]
        indices = [(i, k) for i, k in pairs if isinstance(self.queries[i][k], Readout)]
        theirs = [rows[i] for i, _ in indices]
        if self.undefined_ids and theirs:
            theirs = rows_without(theirs, torch.tensor(self.undefined_ids, dtype=torch.int64))
        found = read_off([self.queries[i][k] for i, k in indices], theirs)
        for (i, k), answer in zip(indices, found, strict=True):
            answers[i][k] = answer
        return answers


def packed(value: Any) -> bytes:
    """Pickle a value; plain CPU tensors take fewer bytes than by torch's own reducer."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


@final
class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Reduce a plain CPU tensor to bytes, dtype and shape; leave other objects to pickle."""
        is_plain = type(obj) is torch.Tensor and obj.is_cpu and obj.layout is torch.strided
        if not is_plain or obj.requires_grad or obj.dtype not in _PLAIN or not obj.numel():
            return NotImplemented
        return _tensor_of, (obj.numpy().tobytes(), obj.dtype, tuple(obj.shape))


_PLAIN: Final = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool})


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


@torch.inference_mode()
def read_off(readouts: Sequence[Any], rows: Sequence[Row]) -> list[Any]:
    """Return each readout's answer, computed from its row, or an exception in its place."""
    answers: list[Any] = [None] * len(readouts)
    kinds: defaultdict[type[Readout], list[int]] = defaultdict(list)
    for i, (readout, row) in enumerate(zip(readouts, rows, strict=True)):
        if row.is_nan:
            answers[i] = EvaluationError("the model's next-token log-probabilities are NaN")
        else:
            kinds[type(readout)].append(i)
    for kind, of_kind in kinds.items():
        first = rows[of_kind[0]]
        size = MANY_ROWS if first.logprobs.is_cpu else MANY_ROWS_OF_DEVICE
        for start in range(0, len(of_kind), size):
            indices = of_kind[start : start + size]
            found = _of_kind(kind, [readouts[i] for i in indices], [rows[i] for i in indices])
            for i, answer in zip(indices, found, strict=True):
                answers[i] = answer
    return answers


def _of_kind(kind: type[Readout], readouts: list[Any], rows: list[Row]) -> Sequence[Any]:
    """Return the answers to readouts of one class; if memory runs out, retry in two halves."""
    table: Any = None
    try:
        if all(row is rows[0] for row in rows):  # one row: a view instead of n copies
            table = rows[0].logprobs[None].expand(len(rows), -1)
        else:
            table = stacked(rows)
        found = kind.of_rows(readouts, table.clone() if kind.modifies_rows else table)
        if isinstance(found, Sequence):
            found = [*found]  # a user-defined sequence may raise here
            if len(found) == len(readouts):
                return found
        many = f"{len(found)} answers" if isinstance(found, Sequence) else shown(found)
        said = f"{kind.__name__}.of_rows returned {many} for {len(readouts)} readouts"
        return [EvaluationError(said)] * len(readouts)
    except (Exception, SystemExit) as error:
        if not is_out_of_memory(error) or len(readouts) == 1:
            return [presentable(error)] * len(readouts)
    table = None  # after the except block, whose traceback would keep the tensors alive
    release_cached_memory()
    half = len(readouts) // 2
    parts = (readouts[:half], rows[:half]), (readouts[half:], rows[half:])
    return [answer for part in parts for answer in _of_kind(kind, *part)]


_PACKAGE: Final = "genlm_backend."

MANY_ROWS: Final = 128
"""Most rows per call of ``of_rows`` on the CPU: at a vocabulary of 131,072, a 64 MiB table."""

MANY_ROWS_OF_DEVICE: Final = 256
"""Most rows per call of ``of_rows`` on a device, where each call costs launches and transfers."""
