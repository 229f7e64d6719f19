"""ProcessEvaluator: an evaluator that lives in a process of its own."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

import torch

from genlm_backend.checks import function
from genlm_backend.errors import EngineDiedError, OptionError, OptionTypeError
from genlm_backend.llm.elsewhere.child_process import ChildProcess
from genlm_backend.llm.elsewhere.messages import Answers, InTable, PackedError
from genlm_backend.llm.evaluator import (
    Evaluator,
    EvaluatorCounts,
    EvaluatorInfo,
    RestartableEvaluator,
)
from genlm_backend.llm.query import Adapter, Query
from genlm_backend.llm.row import Row, own_copy
from genlm_backend.llm.scoring import Answer, Question
from genlm_backend.llm.threads import frequent_switches

_CLOSING_SECONDS: Final = 0.4
"""Seconds that the process has to let go of what it holds, before it is killed."""


@final
class ProcessEvaluator(RestartableEvaluator):
    """An evaluator in another process, which ``open()`` starts.

    What it computes does not wait for Python here, nor what is computed here for it. Rows come
    back through memory that both processes see; everything else is pickled. Errors arrive as what
    they are, with a note of where they were raised. When this process ends, however it does, the
    other one ends as well; when that one ends, queries are an ``EngineDiedError`` until
    ``restart()``.

    Args:
        make: Makes the evaluator, and is called over there: a function of a module, a
            ``functools.partial`` of one, or anything else without arguments that pickles.

    Raises:
        OptionTypeError: (``TypeError``) If ``make`` cannot be called or pickled.
        OptionError: (``ValueError``) On systems that are not POSIX.
    """

    def __init__(self, make: Callable[[], Evaluator]) -> None:
        if os.name != "posix":
            raise OptionError("a process of the model's own needs Linux or macOS")
        self._made_by = pickled("make", function("make", make))
        self._child: ChildProcess | None = None
        self._counts = EvaluatorCounts()
        self._adapters: dict[Adapter, str] = {}
        self._sent_ids: tuple[int, ...] = ()

    @property
    def process_id(self) -> int | None:
        """Number of the process; ``None`` where there is none."""
        return None if self._child is None else self._child.process_id

    # ---------------------------------------------------------------- beginning and ending

    def open(self) -> EvaluatorInfo:
        """Start the process and have it make the evaluator; return what that is able to do."""
        self._child, self._sent_ids = ChildProcess(), ()
        info = self.ask("open", self._made_by)
        if not isinstance(info, EvaluatorInfo):
            return info  # for the caller to refuse
        # The threads are not of this process, and what is drawn over there is no row on its way.
        return replace(info, uses_openmp=False, draws=True)

    def restart(self) -> EvaluatorInfo:
        """End the process, whatever it is doing, start another, and load its adapters again."""
        self._end(0)
        info = self.open()
        for adapter, path in self._adapters.items():
            self.ask("add_adapter", adapter, path)
        return info

    def close(self) -> None:
        """End the process; again has no effect."""
        self._end(_CLOSING_SECONDS)
        self._counts = replace(self._counts, kv_bytes_used=0, kv_bytes_budget=0)

    def _end(self, seconds: float) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end(seconds)

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Return what a method of the evaluator returns over there.

        Raises:
            EngineDiedError: If the process has ended.
            Exception: What the method raised.
        """
        if self._child is None:
            raise EngineDiedError("the model has no process; restart() loads it")
        reply = self._child.ask(verb, *arguments, check_wanted=self.check_wanted)
        self._counts = reply.counts
        if reply.error is not None:
            raise reply.error.error()
        return reply.value

    # ---------------------------------------------------------------- rows and scores

    def evaluate(self, queries: Sequence[Question]) -> Sequence[Answer | Exception]:
        """Return one answer to each query or scoring."""
        if self._sent_ids != self.undefined_ids:
            self.ask("undefined_ids", self.undefined_ids)
            self._sent_ids = self.undefined_ids
        with frequent_switches():
            found = self.ask("evaluate", list(queries))
            if not isinstance(found, Answers):
                return found  # for the caller to refuse
            num_rows = sum(isinstance(answer, InTable) for answer in found.answers)
            rows = iter(self._rows(num_rows, found.width))
        answers: list[Any] = []
        for answer in found.answers:
            if isinstance(answer, InTable):
                answers.append(Row(next(rows), answer.normaliser))
            else:
                answers.append(answer.error() if isinstance(answer, PackedError) else answer)
        return answers

    def _rows(self, num_rows: int, width: int) -> list[torch.Tensor]:
        """Copy rows out of the shared memory, as many at once as it has."""
        assert self._child is not None
        rows: list[torch.Tensor] = []
        while len(rows) < num_rows:
            if rows:
                self.ask("more")
            count = min(num_rows - len(rows), self._child.rows.max_rows(width))
            table = self._child.rows.table(count, width)
            rows.extend(map(own_copy, table))
        return rows

    # ---------------------------------------------------------------- what is kept

    def num_cached(self, query: Query) -> int:
        """Return how many of a context's tokens need not be computed if it is asked now."""
        return self.ask("num_cached", query)

    def forget(self, query: Query, keep: int) -> None:
        """Free the keys and values of a context beyond its first ``keep`` tokens."""
        with contextlib.suppress(EngineDiedError):  # they have gone with the process
            self.ask("forget", query, keep)

    def pin(self, query: Query) -> bool:
        """Compute a context and keep its keys and values; return whether there was room."""
        return self.ask("pin", query)

    def clear(self) -> None:
        """Free all keys and values."""
        with contextlib.suppress(EngineDiedError):
            self.ask("clear")

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter, which is loaded again when the process is."""
        path = os.path.abspath(path) if Path(path).exists() else path
        self.ask("add_adapter", adapter, path)
        self._adapters[adapter] = path

    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter."""
        self._adapters.pop(adapter, None)
        with contextlib.suppress(EngineDiedError):
            self.ask("remove_adapter", adapter)

    def counts(self) -> EvaluatorCounts:
        """Return what the evaluator of the process that is there has done so far."""
        return self._counts


def pickled(name: str, value: Any) -> bytes:
    """Return a value as bytes for another process.

    Raises:
        OptionTypeError: (``TypeError``) If that cannot be.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever an object's own way of pickling raises
        raise OptionTypeError(f"{name} cannot be given to another process: {error}") from error
