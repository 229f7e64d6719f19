"""ProcessEvaluator: an evaluator in a child process, connected by a socket."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch

from genlm_backend.checks import function
from genlm_backend.errors import EngineDiedError, OptionError, OptionTypeError, QueryDroppedError
from genlm_backend.queries.evaluator import Evaluator
from genlm_backend.queries.row import own_table
from genlm_backend.remote.channel import Channel, SharedRows
from genlm_backend.remote.messages import DROP, Reply, Request
from genlm_backend.remote.remote_evaluator import RemoteEvaluator
from genlm_backend.runtime.progress import is_watched

_LOOK_SECONDS: Final = 0.05
"""Seconds between two checks that the process is alive and that a caller still waits."""
_LAST_LINES: Final = 50
"""Number of the process's last output lines to keep, for the error that reports its end."""
_PROGRESS: Final = re.compile(r"\d%\|| \d+(\.\d+)?(it/s|s/it)\b|^\s*$")
"""Matches lines that are not kept: progress bars and empty lines."""
_CLOSING_SECONDS: Final = 0.4
"""Seconds that the process gets to free its memory before it is killed."""


@final
class ProcessEvaluator(RemoteEvaluator):
    """An evaluator in a child process, which ``open()`` starts.

    The model and this process's Python code do not wait for each other's GIL. Float32 rows come
    back through memory that both processes map; everything else is pickled. Errors keep their type
    if they can be pickled, with a note of their traceback in the child. The child ends when this
    process ends. If the child dies, queries raise an ``EngineDiedError`` until ``restart()``.

    Args:
        make: Makes the evaluator when called in the child: a function of a module, a
            ``functools.partial`` of one, or another picklable callable without arguments.

    Raises:
        OptionTypeError: (``TypeError``) If ``make`` cannot be called or pickled.
        OptionError: (``ValueError``) On systems that are not POSIX.
    """

    def __init__(self, make: Callable[[], Evaluator]) -> None:
        super().__init__()
        if os.name != "posix":
            raise OptionError("a model in a child process needs Linux or macOS")
        self._made_by = pickled("make", function("make", make))
        self._child: ChildProcess | None = None

    @property
    def process_id(self) -> int | None:
        """The child's process id; ``None`` if there is no child."""
        return None if self._child is None else self._child.process_id

    @property
    def has_died(self) -> bool:
        """Whether the child has ended by itself."""
        return self._child is not None and self._child.has_ended

    def _check_alive(self) -> None:
        if self._child is None:
            raise EngineDiedError("the model has no process: load it with restart()")

    def _reply(self, method: str, packed: bytes) -> Reply:
        assert self._child is not None
        return self._child.ask(method, packed, self.check_cancelled)

    def _started(self) -> Any:
        self._child = ChildProcess()
        return self.ask("open", self._made_by)

    def _end(self, is_kind: bool) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end(_CLOSING_SECONDS if is_kind else 0)

    def _tables(self, num_rows: int, width: int) -> Iterator[torch.Tensor]:
        """Yield copies of the rows; the child puts them into the shared memory part by part."""
        assert self._child is not None
        most = self._child.rows.max_rows(width)
        for start in range(0, num_rows, most):
            if start:
                self.ask("more")
            yield own_table(self._child.rows.table(min(num_rows - start, most), width))


def pickled(name: str, value: Any) -> bytes:
    """Pickle an argument; if that fails, raise an ``OptionTypeError`` with its ``name``."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling may raise any exception
        raise OptionTypeError(f"{name} cannot be sent to another process: {error}") from error


@final
class ChildProcess:
    """A child process; only one thread at a time may call it. It ends when its parent ends."""

    def __init__(self) -> None:
        self._number = 0
        self._output: deque[str] = deque(maxlen=_LAST_LINES)
        with contextlib.ExitStack() as undo:
            self.rows = SharedRows.new()
            undo.callback(self.rows.close)
            here, there = socket.socketpair()
            undo.callback(here.close)
            reader, writer = -1, -1
            with there:
                descriptors = (there.fileno(), self.rows.descriptor)
                arguments = map(str, (*descriptors, os.getpid(), int(is_watched())))
                path = os.pathsep.join(map(os.path.abspath, sys.path))
                reader, writer = os.pipe()
                undo.callback(os.close, reader)
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "genlm_backend.remote.child", *arguments],
                        env={**os.environ, "PYTHONPATH": path},
                        stdin=subprocess.DEVNULL,
                        stdout=writer,
                        stderr=writer,
                        pass_fds=descriptors,
                        start_new_session=True,  # so that Ctrl-C does not interrupt it
                    )
                finally:
                    os.close(writer)
            undo.pop_all()
        self._finalizer = weakref.finalize(self, _kill, self._process, here, os.getpid())
        self._channel = Channel(here, _LOOK_SECONDS)
        self._relay = threading.Thread(
            target=_relay, args=(reader, self._output), name="genlm-output", daemon=True
        )
        self._relay.start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, method: str, packed: bytes, check_cancelled: Callable[[], None]) -> Reply:
        self._number += 1

        def look() -> None:
            if self.has_ended:
                raise EOFError
            check_cancelled()

        try:
            self._channel.send(_message(Request(self._number, method, packed)), look)
            while True:
                reply: Reply = pickle.loads(self._channel.receive(look))
                if reply.number == self._number:  # earlier replies answer dropped requests
                    return reply
        except QueryDroppedError:
            with contextlib.suppress(OSError, EOFError):
                self._channel.send(_message(Request(self._number, DROP)), _give_up)
            raise
        except (EOFError, OSError):
            if not self._finalizer.alive:
                raise QueryDroppedError(
                    "the model's process ended before the query was answered: the interpreter is "
                    "exiting"
                ) from None
            raise self.how_it_ended() from None

    def how_it_ended(self) -> EngineDiedError:
        """Return an error with exit code or signal and last output; kill the process if it runs."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            self.end(0)
            return EngineDiedError(
                f"the model's process {self.process_id} has closed its connection and was ended: "
                "reload the model with restart()"
            )
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {_signal_name(-code)}"
            how += ", as happens when memory runs out" if -code == signal.SIGKILL else ""
        self._relay.join(1)
        said = "".join(self._output).strip()
        return EngineDiedError(
            f"the model's process {self.process_id} {how}: reload the model with restart()"
            + (f". Its last output:\n{said}" if said else "")
        )

    def end(self, seconds: float) -> None:
        """Ask the process to close, and kill it after ``seconds``; a second call has no effect."""
        if self._process.poll() is None and seconds > 0 and self._channel.is_clear:
            with contextlib.suppress(OSError, EOFError):
                self._channel.send(_message(Request(self._number + 1, "close")), _give_up)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self._finalizer()
        self.rows.close()


def _message(request: Request) -> bytes:
    return pickle.dumps(tuple(request), pickle.HIGHEST_PROTOCOL)


def _give_up() -> None:
    raise EOFError


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def _relay(reader: int, output: deque[str]) -> None:
    """Copy a pipe's lines to standard error, and to ``output`` unless ``_PROGRESS`` matches."""
    with open(reader, encoding="utf-8", errors="replace", newline="", buffering=1) as lines:
        while text := lines.readline():
            if not _PROGRESS.search(text):
                output.append(text)
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                sys.stderr.write(text)
                sys.stderr.flush()


def _kill(process: subprocess.Popen[bytes], sock: socket.socket, owner: int) -> None:
    sock.close()
    if os.getpid() != owner:  # in a fork, the process is not our child
        return
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
