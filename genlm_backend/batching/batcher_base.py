"""BatcherBase: a worker thread that is asked questions, and runs functions between them."""

from __future__ import annotations

import abc
import concurrent.futures
import time
from collections.abc import Callable, Iterable, Set
from typing import Any, Final, Generic, TypeVar, final

from genlm_backend.batching.policy import BatchPolicy
from genlm_backend.batching.round import Loop, call_threadsafe, presentable
from genlm_backend.batching.statistics import BatcherStatistics
from genlm_backend.batching.worker import Worker
from genlm_backend.errors import BatcherClosedError, QueryDroppedError
from genlm_backend.runtime.forks import ProcessLock

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class BatcherBase(abc.ABC, Generic[Q, R]):
    """The base of ``Batcher``, and of several that look like one to a model; has the worker thread.

    Args:
        name: What errors call it, and debuggers the thread, with ``genlm-`` before it.

    Attributes:
        policy: When a batch goes.
    """

    policy: BatchPolicy

    def __init__(self, name: str) -> None:
        self._name, self._worker, self._lock = name, Worker(f"genlm-{name}"), ProcessLock()
        self._is_wanted: Callable[[], bool] | None = None  # what the worker is at
        self._sleepers: Set[Loop] = frozenset()  # loops of those who wait for it
        self._last_wake = 0.0
        self._given_up: QueryDroppedError | None = None  # what has ended it
        self._is_closed = False
        self._fences: dict[_Call[Any], int] = {}  # calls that are queued: the query after each

    @abc.abstractmethod
    async def submit(self, query: Q) -> R:
        """Return the result for ``query``."""

    @abc.abstractmethod
    async def submit_all(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, in order."""

    @abc.abstractmethod
    def submit_sync(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, blocking this thread."""

    @abc.abstractmethod
    def set_policy(self, **fields: Any) -> None:
        """Replace fields of the policy."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Let everything that waits go now."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Block until everything that has been asked so far is answered; not on the worker thread.

        Nothing is waited for meanwhile. Raises what ``call`` does.
        """

    @abc.abstractmethod
    def drop(self, reason: str = ...) -> int:
        """Settle every waiter with a ``QueryDroppedError``; return how many there were."""

    @abc.abstractmethod
    def statistics(self) -> BatcherStatistics:
        """Return the counts so far."""

    # ---------------------------------------------------------------- functions

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the worker thread, after the batches already sent; block for it.

        What is asked after a call is evaluated after it, unless an equal query goes before. An
        interrupted thread leaves one that has not begun unrun. Raises what ``check_open`` does.
        """
        if self._worker.is_current_thread():
            return function()
        call = self._put(function)
        try:
            return call.future.result()
        except BaseException:  # a thread that is interrupted wants it no more
            call.is_wanted = False
            call.future.cancel()
            raise

    def call_soon(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run ``function`` on the worker thread, after the batches already sent; see ``call``.

        Returns:
            A future of what it returns or raises. Cancelled before its turn, nothing is run.
        """
        return self._put(function).future

    def _put(self, function: Callable[[], T]) -> _Call[T]:
        call = _Call(function)
        with self._lock.here:
            self.check_open()
            self._worker.put(lambda: self._run_call(call))
            # Last: after an interrupt, a fence without its call would hold queries up for ever.
            self._fences[call] = self._next_number
        return call

    @property
    @abc.abstractmethod
    def _next_number(self) -> int:
        """Number of the query that is asked next; under the lock."""

    def check_open(self) -> None:
        """Raise what a query that is asked now would raise at once.

        Raises:
            BatcherClosedError: As ``submit``.
            ForkedError: As there.
        """
        self._lock.claim()
        if self._is_closed:
            raise BatcherClosedError(f"{self._name} has been closed and answers no more")
        if self._worker.is_stopped:
            raise BatcherClosedError(f"{self._name} cannot answer: the interpreter exits")

    def check_wanted(self) -> None:
        """Raise if nobody waits any more for what the worker thread is doing.

        For ``evaluate``, and for what ``call`` runs, between two steps of long work: the error is
        to be let through. It reaches nobody, but for those who wait while the interpreter exits;
        whoever has come meanwhile is answered by another batch. On other threads, no effect.

        Raises:
            QueryDroppedError: If all callers have gone, at ``close()``, and at interpreter exit.
        """
        if not self._worker.is_current_thread():
            return
        with self._lock.here:
            is_given_up = self._is_ending()
            is_given_up = is_given_up or (self._is_wanted is not None and not self._is_wanted())
            self._wake_sleepers(is_given_up)
            if is_given_up:
                is_exit = self._worker.is_stopped and not self._is_closed
                why = ": the interpreter exits" if is_exit else ""
                self._given_up = QueryDroppedError(f"ended before the query was answered{why}")
                raise self._given_up

    def _wake_sleepers(self, is_given_up: bool) -> None:
        """Wake the loops of those who wait, now and then.

        One that a notebook's stop button has cancelled a task of, in a signal's handler, would
        sleep on until the result comes, or for ever where none comes.
        """
        now = time.monotonic()
        if is_given_up or now - self._last_wake >= _WAKE_SECONDS:
            self._last_wake = now
            for loop in [*self._sleepers]:
                if loop is not None:
                    call_threadsafe(loop, _nothing)

    @abc.abstractmethod
    def close(self) -> None:
        """End the thread, after what it is doing; again has no effect."""

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that it belongs to."""
        return self._lock.is_foreign

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` has been called."""
        return self._is_closed

    def _is_ending(self) -> bool:
        return self._is_closed or self._worker.is_stopped

    def _run_call(self, call: _Call[Any]) -> None:
        with self._lock.here:
            self._fences.pop(call, None)
        self._is_wanted = lambda: call.is_wanted
        if call.future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            try:
                call.future.set_result(call.function())
            except BaseException as raised:
                call.future.set_exception(presentable(raised))
        self._is_wanted = self._given_up = None


@final
class _Call(Generic[T]):
    """A function that the worker thread is to run between two batches."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function, self.is_wanted = function, True
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()


_WAKE_SECONDS: Final = 0.1
"""Seconds between two times that loops are woken during a long evaluation."""


def _nothing() -> None:
    return None
