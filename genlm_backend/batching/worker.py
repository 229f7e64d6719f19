"""Worker: a thread that runs calls in order and keeps no reference to its owner."""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Final, final

from genlm_backend.errors import BatcherClosedError

_ENDED: Final = "the worker thread has ended, as it does when the interpreter exits"


@final
class _Calls(queue.SimpleQueue):
    """A queue of calls for one thread; after ``close()`` it accepts no more."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def claim(self) -> bool:
        """Let the current thread run the calls, unless another does; return whether it may."""
        with self._lock:
            if self.thread is None:
                self.thread = threading.current_thread()
                return True
            return False

    def add(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self.is_closed:
                raise BatcherClosedError(_ENDED)
            self.put(call)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self.put(None)


@final
class Worker:
    """Runs calls one after another on a daemon thread that the first call starts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls = _Calls()
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize | None = None

    def put(self, call: Callable[[], None]) -> None:
        """Queue ``call``, which must raise no error; only one thread at a time may call ``put``."""
        if self.is_stopped:
            raise BatcherClosedError(_ENDED)
        if self._thread is None:
            thread = threading.Thread(
                target=_work, args=(self._calls,), name=self._name, daemon=True
            )
            try:
                # If a Ctrl-C interrupts this, the thread may run all the same. The next ``put``
                # then starts a second thread, which ``claim`` refuses, so that it ends at once.
                thread.start()
            except RuntimeError as error:
                if threading.main_thread().is_alive():
                    raise
                raise BatcherClosedError(f"the interpreter is exiting: {error}") from error
            self._thread = thread
            self._finalizer = weakref.finalize(self, _stop, self._calls, thread)
        self._calls.add(call)  # if the call raised, the thread would end

    @property
    def is_stopped(self) -> bool:
        """Whether the worker takes no more calls: after ``stop()``, and at interpreter exit."""
        return self._calls.is_closed or sys.is_finalizing()

    def stop(self) -> None:
        """Finish the calls already queued and end the thread; a second call has no effect."""
        if self._finalizer is None:
            self._calls.close()
        elif self._finalizer.alive:
            self._finalizer()
        elif self._thread is not None:  # an earlier stop() may have been interrupted
            _join(self._thread, self._calls.thread)

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._calls.thread


def _work(calls: _Calls) -> None:
    if not calls.claim():
        return
    while (call := calls.get()) is not None:
        call()
        del call  # or it would keep its batch alive until the next call


def _stop(calls: _Calls, thread: threading.Thread) -> None:
    alive = [own for own in (thread, calls.thread) if own is not None and own.is_alive()]
    if alive:  # in a fork, neither thread is alive
        calls.close()
        _join(*alive)


def _join(*threads: threading.Thread | None) -> None:
    for started in threads:
        if started is not None and started is not threading.current_thread():
            started.join()
