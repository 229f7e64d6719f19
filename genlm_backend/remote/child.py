"""The process that an evaluator lives in; started by ``ChildProcess`` and by nobody else."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, final

from genlm_backend.errors import EvaluationError, QueryDroppedError
from genlm_backend.model.evaluator import Evaluator, EvaluatorCounts
from genlm_backend.model.row import Row, put
from genlm_backend.remote.answers import drawn_there, is_row, sendable
from genlm_backend.remote.arguments import Receiver
from genlm_backend.remote.channel import Channel
from genlm_backend.remote.messages import (
    DROP,
    Answers,
    InTable,
    NotKnown,
    PackedError,
    Reply,
    Request,
)
from genlm_backend.remote.shared_rows import SharedRows

_LOOK_SECONDS: Final = 0.2
"""Seconds between two looks at whether the parent process lives."""


@final
class Server:
    """Carries out what the parent process asks, one request after another.

    A second thread reads the requests, so that it learns during a long one that nobody waits for
    it any more, or that the parent process has ended, with which this one ends too.

    Args:
        channel: To the parent process.
        rows: Where rows are put for it.
        parent: Number of that process.
    """

    def __init__(self, channel: Channel, rows: SharedRows, parent: int) -> None:
        self._channel, self._rows, self._parent = channel, rows, parent
        self._receiver = Receiver()
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._evaluator: Evaluator | None = None
        self._waiting: list[Row] = []  # rows that are still to be put into the table
        self._current = self._dropped = -1

    def serve(self) -> None:
        """Answer until the parent process says ``close``."""
        threading.Thread(target=self._read, name="genlm-requests", daemon=True).start()
        while True:
            request = self._requests.get()
            self._current = request.number
            value, error = None, None
            try:
                value = self._answer(request)
            except BaseException as raised:  # whatever it is, it is for the parent process
                error = PackedError.of(raised)
            self._send(Reply(request.number, value, error, self._counts()))
            if request.verb == "close":
                return

    def _send(self, reply: Reply) -> None:
        try:
            message = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        except Exception as raised:  # whatever the way of pickling of what was returned raises
            error = PackedError.of(EvaluationError(f"what was returned cannot be sent: {raised}"))
            message = pickle.dumps(reply._replace(value=None, error=error))
        self._channel.send(message, self._check_parent)

    def _read(self) -> None:
        try:
            while True:
                request = Request(*pickle.loads(self._channel.receive(self._check_parent)))
                if request.verb == DROP:
                    self._dropped = request.number
                else:
                    self._requests.put(request)
        except (EOFError, OSError):
            os._exit(1)

    def _check_parent(self) -> None:
        if os.getppid() != self._parent:  # a fork of it may hold the socket open
            os._exit(1)

    def _check_wanted(self) -> None:
        if self._dropped >= self._current:
            raise QueryDroppedError("ended before the query was answered")

    def _counts(self) -> EvaluatorCounts:
        return EvaluatorCounts() if self._evaluator is None else self._evaluator.counts()

    # ---------------------------------------------------------------- verbs

    def _answer(self, request: Request) -> Any:
        arguments = self._receiver.arguments(request.arguments)
        if arguments is None:
            return NotKnown()
        if request.verb == "open":
            return self._open(*arguments)
        evaluator = self._evaluator
        assert evaluator is not None
        if request.verb == "more":
            return self._put()
        if request.verb == "undefined_ids":
            (evaluator.undefined_ids,) = arguments
            return None
        if request.verb == "evaluate":
            (questions,) = arguments
            return self._answers(drawn_there(evaluator, questions))
        return getattr(evaluator, request.verb)(*arguments)

    def _open(self, made_by: bytes) -> Any:
        try:
            make = pickle.loads(made_by)
        except Exception as error:
            raise EvaluationError(
                f"the process of the model cannot import what makes it ({error}); what is defined "
                "in a script or a notebook has to be in a module of its own"
            ) from error
        evaluator = make()
        if not isinstance(evaluator, Evaluator):
            raise EvaluationError(f"{make!r} must return an Evaluator, got {type(evaluator)}")
        evaluator.check_wanted = self._check_wanted
        self._evaluator = evaluator
        info = evaluator.open() if evaluator.info is None else evaluator.info
        gc.collect()
        gc.freeze()  # what has been loaded stays, and need not be looked through for garbage
        return info

    def _answers(self, found: Any) -> Any:
        if not isinstance(found, Sequence):
            return found  # for the parent process to refuse
        rows = [answer for answer in found if is_row(answer)]
        width = len(rows[0].logprobs) if rows else 0
        self._waiting = [row for row in rows if len(row.logprobs) == width]
        in_table = {id(row) for row in self._waiting}
        answers = [
            InTable(answer.normaliser) if id(answer) in in_table else sendable(answer)
            for answer in found
        ]
        self._put()
        return Answers(answers, width)

    def _put(self) -> int:
        """Put as many rows into the table as it takes; return how many are left."""
        if self._waiting:
            width = len(self._waiting[0].logprobs)
            batch = self._waiting[: self._rows.max_rows(width)]
            table = self._rows.table(len(batch), width)
            for own, row in zip(table, batch, strict=True):
                put(row.logprobs, own)
            self._waiting = self._waiting[len(batch) :]
        return len(self._waiting)


def main(arguments: Sequence[str]) -> None:
    """Serve the parent process until it closes the model or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the cell or the shell
    faulthandler.enable()
    descriptor, rows, parent, is_watched = map(int, arguments)
    for inherited in (descriptor, rows):
        os.set_inheritable(inherited, False)
    from genlm_backend.runtime.progress import tell

    tell(bool(is_watched))
    channel = Channel(socket.socket(fileno=descriptor), _LOOK_SECONDS)
    Server(channel, SharedRows(rows), parent).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without a wait for whatever threads there are


if __name__ == "__main__":
    main(sys.argv[1:])
