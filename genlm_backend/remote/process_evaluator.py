"""ProcessEvaluator: an evaluator that lives in a process of its own."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch

from genlm_backend.checks import function
from genlm_backend.errors import EngineDiedError, OptionError, OptionTypeError
from genlm_backend.model.evaluator import Evaluator
from genlm_backend.model.row import own_table
from genlm_backend.remote.child_process import ChildProcess
from genlm_backend.remote.messages import Reply
from genlm_backend.remote.remote_evaluator import RemoteEvaluator

_CLOSING_SECONDS: Final = 0.4
"""Seconds that the process has to let go of what it holds, before it is killed."""


@final
class ProcessEvaluator(RemoteEvaluator):
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
        super().__init__()
        if os.name != "posix":
            raise OptionError("a process of the model's own needs Linux or macOS")
        self._made_by = pickled("make", function("make", make))
        self._child: ChildProcess | None = None

    @property
    def process_id(self) -> int | None:
        """Number of the process; ``None`` where there is none."""
        return None if self._child is None else self._child.process_id

    @property
    def has_died(self) -> bool:
        """Whether its process has ended by itself."""
        return self._child is not None and self._child.has_ended

    def _check_alive(self) -> None:
        if self._child is None:
            raise EngineDiedError("the model has no process; restart() loads it")

    def _reply(self, verb: str, packed: bytes) -> Reply:
        assert self._child is not None
        return self._child.ask(verb, packed, self.check_wanted)

    def _started(self) -> Any:
        self._child = ChildProcess()
        return self.ask("open", self._made_by)

    def _end(self, is_kind: bool) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end(_CLOSING_SECONDS if is_kind else 0)

    def _tables(self, num_rows: int, width: int) -> Iterator[torch.Tensor]:
        """Copy rows out of the shared memory, as many at once as it has."""
        assert self._child is not None
        most = self._child.rows.max_rows(width)
        for start in range(0, num_rows, most):
            if start:
                self.ask("more")
            yield own_table(self._child.rows.table(min(num_rows - start, most), width))


def pickled(name: str, value: Any) -> bytes:
    """Return a value as bytes for another process."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever an object's own way of pickling raises
        raise OptionTypeError(f"{name} cannot be given to another process: {error}") from error
