"""ChildProcess: a process of an evaluator's own, seen from the one that asks."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, final

from genlm_backend.errors import EngineDiedError, QueryDroppedError
from genlm_backend.llm.elsewhere.messages import DROP, Reply, Request
from genlm_backend.llm.elsewhere.shared_rows import SharedRows
from genlm_backend.llm.watching import is_watched

_LOOK_SECONDS: Final = 0.05
"""Seconds between two looks at whether the process lives and whether anybody waits."""
_LAST_LINES: Final = 50
"""Lines of its output that are kept, for the error that tells how it ended."""


@final
class ChildProcess:
    """A process that is asked by one thread at a time, and ends with whoever has started it.

    What it prints appears on standard error here. Ctrl-C does not reach it.

    Attributes:
        rows: Memory that both processes see.
    """

    def __init__(self) -> None:
        self.rows = SharedRows.new()
        self._number = 0
        self._output: deque[str] = deque(maxlen=_LAST_LINES)
        here, there = socket.socketpair()
        reader, writer = os.pipe()
        try:
            with there:
                descriptors = (there.fileno(), self.rows.descriptor)
                self._process = subprocess.Popen(
                    _command(*descriptors),
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=writer,
                    stderr=writer,
                    pass_fds=descriptors,
                    start_new_session=True,  # so that it is not of the terminal's foreground group
                )
        except BaseException:
            here.close()
            os.close(reader)
            self.rows.close()
            raise
        finally:
            os.close(writer)
        self._connection = Connection(here.detach())
        relay = threading.Thread(
            target=_relay, args=(reader, self._output), name="genlm-output", daemon=True
        )
        relay.start()
        self._relay = relay
        self._finalizer = weakref.finalize(self, _kill, self._process, os.getpid())

    @property
    def process_id(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ask(self, verb: str, *arguments: Any, check_wanted: Callable[[], None]) -> Reply:
        """Return the reply to a request.

        Args:
            verb: What is to be done.
            *arguments: Values that pickle.
            check_wanted: Called every now and then. What it raises ends the waiting, and the
                request is dropped.

        Raises:
            EngineDiedError: If the process has ended.
        """
        self._number += 1
        request = Request(self._number, verb, arguments)
        message = pickle.dumps(tuple(request), pickle.HIGHEST_PROTOCOL)
        try:
            self._connection.send_bytes(message)
            while True:
                self._wait(check_wanted)
                reply: Reply = pickle.loads(self._connection.recv_bytes())
                if reply.number == self._number:  # and not to one that was dropped
                    return reply
        except QueryDroppedError:
            with contextlib.suppress(OSError):
                drop = Request(self._number, DROP)
                self._connection.send_bytes(pickle.dumps(tuple(drop)))
            raise
        except (EOFError, OSError):
            raise self.how_it_ended() from None

    def _wait(self, check_wanted: Callable[[], None]) -> None:
        while not self._connection.poll(_LOOK_SECONDS):
            if self._process.poll() is not None and not self._connection.poll(0):
                raise EOFError
            check_wanted()

    def how_it_ended(self) -> EngineDiedError:
        """Return the error that tells how the process has ended, which it has."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:  # it has closed its connection, which it never does
            self.end(0)
            code = self._process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += ", as systems do that run out of memory" if -code == signal.SIGKILL else ""
        self._relay.join(1)
        said = "".join(self._output).strip()
        return EngineDiedError(
            f"the process {self.process_id} that the model lives in {how}; restart() loads it "
            "again" + (f". It said last:\n{said}" if said else "")
        )

    def end(self, seconds: float) -> None:
        """End the process: by itself if it does so within some seconds. Again has no effect."""
        if self._process.poll() is None and seconds > 0:
            with contextlib.suppress(OSError):
                close = Request(self._number + 1, "close")
                self._connection.send_bytes(pickle.dumps(tuple(close)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self._finalizer()
        self._connection.close()
        self.rows.close()


def _command(*descriptors: int) -> list[str]:
    arguments = (*descriptors, os.getpid(), int(is_watched()))
    child = "genlm_backend.llm.elsewhere.child"
    return [sys.executable, "-P", "-m", child, *map(str, arguments)]


def _environment() -> dict[str, str]:
    """Return this process's environment, and where it finds modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def _relay(reader: int, output: deque[str]) -> None:
    """Print what comes out of a pipe on standard error, until its other end is closed."""
    with open(reader, encoding="utf-8", errors="replace", newline="", buffering=1) as lines:
        while text := lines.readline():
            output.append(text)
            with contextlib.suppress(OSError, ValueError):  # nobody reads there any more
                sys.stderr.write(text)
                sys.stderr.flush()


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork has no children of its parent's
        return
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
