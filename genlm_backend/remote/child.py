"""The main program of an evaluator's process; only ``ChildProcess`` starts it."""

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
from typing import Final, final

from genlm_backend.errors import EvaluationError
from genlm_backend.queries.row import Row, put_rows
from genlm_backend.readouts.readout import packed
from genlm_backend.remote.channel import Channel, SharedRows
from genlm_backend.remote.evaluator_server import EvaluatorServer
from genlm_backend.remote.messages import DROP, PackedError, Reply, Request

_LOOK_SECONDS: Final = 0.2
"""Seconds between two checks that the parent process is alive."""


@final
class Server:
    """Passes the parent's requests to the evaluator one by one, and sends the replies."""

    def __init__(self, channel: Channel, rows: SharedRows, parent: int) -> None:
        self._channel, self._rows, self._parent = channel, rows, parent
        self._end = EvaluatorServer(self._put, BaseException)  # the parent gets any exception
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def serve(self) -> None:
        """Answer requests until the parent process sends ``close``."""
        threading.Thread(target=self._read, name="genlm-requests", daemon=True).start()
        while True:
            request = self._requests.get()
            reply = self._end.reply(request)
            if request.method == "open" and reply.error is None:
                gc.collect()
                gc.freeze()  # the loaded model stays: skip it in collections
            self._send(reply)
            if request.method == "close":
                return

    def _put(self, rows: list[Row]) -> tuple[None, list[Row]]:
        """Copy the first rows, as many as fit, into the shared memory; return those left over."""
        width = len(rows[0].logprobs)
        count = min(len(rows), self._rows.max_rows(width))
        put_rows(rows[:count], self._rows.table(count, width))
        return None, rows[count:]

    def _send(self, reply: Reply) -> None:
        try:
            message = packed(reply)
        except Exception as raised:  # pickling a returned object may raise any error
            error = PackedError.of(EvaluationError(f"the answer cannot be sent back: {raised}"))
            message = pickle.dumps(reply._replace(value=None, error=error))
        self._channel.send(message, self._check_parent)

    def _read(self) -> None:
        try:
            while True:
                request = Request(*pickle.loads(self._channel.receive(self._check_parent)))
                if request.method == DROP:
                    self._end.drop(request.number)
                else:
                    self._requests.put(request)
        except (EOFError, OSError):
            os._exit(1)

    def _check_parent(self) -> None:
        if os.getppid() != self._parent:  # no EOF comes if a fork of the parent has the socket
            os._exit(1)


def serve_child(arguments: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts only the parent
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
    os._exit(0)  # without waiting for other threads


if __name__ == "__main__":
    serve_child(sys.argv[1:])
