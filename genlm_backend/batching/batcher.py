"""The library's only event-loop code: queries in, batches out, results back to their loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from genlm_backend.batching.policy import BatchPolicy, BatchState, Decision
from genlm_backend.batching.statistics import BatcherStatistics
from genlm_backend.batching.waiter import (
    Entry,
    Settlement,
    Waiter,
    call_threadsafe,
    deliver,
)
from genlm_backend.batching.worker import Worker
from genlm_backend.checks import function, instance, optional, text
from genlm_backend.errors import BatcherClosedError, EvaluationError, QueryDroppedError

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


_POLICY = instance(BatchPolicy, "a BatchPolicy")


class _LoopTicker:
    """What one event loop has seen of the queue since its tick was last scheduled."""

    __slots__ = ("is_scheduled", "num_passes", "num_quiet_passes", "seen", "since")

    def __init__(self) -> None:
        self.is_scheduled = False
        self.restart(0.0, -1)

    def restart(self, now: float, seen: int) -> None:
        self.num_passes = self.num_quiet_passes = 0
        self.since = now
        self.seen = seen


class Batcher(Generic[Q, R]):
    """Coalesces concurrent queries into batches and evaluates them on one worker thread.

    ``evaluate`` is an ordinary function from a list of distinct queries to as many results; it
    knows no futures and is never called twice at once. While it runs, the event loops are free
    and new queries gather; they go when it returns. Any number of event loops and threads may
    use one batcher. Equal keys share one result object: whoever hands results on as something
    to be modified copies them first.

    A caller that is cancelled disturbs nobody, and its query is not evaluated unless somebody
    else wants it. An exception out of ``evaluate`` reaches the callers of that batch and no
    one else; one that it returns in place of a result, the callers of that query.

    Args:
        evaluate: Called on the worker thread with 1 to ``policy.max_batch_size`` queries.
        policy: When a batch goes.
        key: Queries with equal keys are one query. Default: the query itself.
        name: Of the worker thread, for debuggers.

    Raises:
        OptionTypeError: (``TypeError``) If one of them is of another type.
    """

    def __init__(
        self,
        evaluate: Callable[[list[Q]], Sequence[R | Exception]],
        policy: BatchPolicy | None = None,
        key: Callable[[Q], Hashable] | None = None,
        name: str = "genlm-batcher",
    ) -> None:
        self._evaluate = function("evaluate", evaluate)
        self.policy = optional(_POLICY)("policy", policy) or BatchPolicy()
        self._key = optional(function)("key", key)
        self._worker = Worker(text("name", name))
        self._lock = threading.Lock()
        self._pending: dict[Hashable, Entry] = {}
        self._in_flight: dict[Hashable, Entry] = {}
        self._tickers: dict[asyncio.AbstractEventLoop, _LoopTicker] = {}
        self._is_busy = False
        self._is_urgent = False
        self._is_closed = False
        self._num_arrived = 0
        self._num_submitted = self._num_joined = self._num_skipped = self._num_failed = 0
        self._batch_sizes: Counter[int] = Counter()

    # ---------------------------------------------------------------- asking

    async def submit(self, query: Q) -> R:
        """Return the result for ``query``, evaluated together with whatever else is waiting.

        Raises:
            BatcherClosedError: After ``close()``.
            QueryDroppedError: If ``drop()`` or ``close()`` came first.
            Exception: What ``evaluate`` raised for this query's batch.
        """
        waiter = self._submit_nowait(query, asyncio.get_running_loop())
        try:
            return cast(R, await cast("asyncio.Future[R]", waiter.future))
        except (asyncio.CancelledError, GeneratorExit):
            self._forget(waiter)
            raise

    def submit_sync(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, blocking this thread; full batches where they fit.

        Nothing is waited for: what is pending goes along at once. Safe inside a running event
        loop, which stands still meanwhile.

        Raises:
            BatcherClosedError: After ``close()``.
            QueryDroppedError: If ``drop()`` or ``close()`` came first.
            RuntimeError: When called from within ``evaluate``, which could never end.
            Exception: What ``evaluate`` raised for one of the batches.
        """
        if self._worker.is_current_thread():
            raise RuntimeError("evaluate() cannot wait for its own batcher")
        waiters: list[Waiter] = []
        try:
            with self._lock:
                waiters.extend(self._enqueue(query, None) for query in queries)
                # Nothing to hurry where all of them joined what is under evaluation.
                self._is_urgent = bool(self._pending)
                self._advance(None)
            return [cast(R, waiter.future.result()) for waiter in waiters]
        except BaseException:
            for waiter in waiters:
                waiter.future.cancel()
                self._forget(waiter)
            raise

    def _submit_nowait(self, query: Q, loop: asyncio.AbstractEventLoop) -> Waiter:
        """Queue ``query`` for ``loop``, the running one, and return its waiter at once."""
        with self._lock:
            waiter = self._enqueue(query, loop)
            if waiter.entry.key in self._pending:
                self._advance(loop)
        return waiter

    def flush(self) -> None:
        """Let everything that waits go now, or as soon as the worker is free."""
        with self._lock:
            if self._pending:
                self._is_urgent = True
                self._advance(None)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the worker thread, after the batches already sent; block for it.

        Raises:
            BatcherClosedError: After ``close()``.
        """
        if self._worker.is_current_thread():
            return function()
        return self.call_soon(function).result()

    def call_soon(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run ``function`` on the worker thread, after the batches already sent.

        Returns:
            A future of what it returns or raises. Cancelled before its turn, nothing is run.

        Raises:
            BatcherClosedError: After ``close()``.
        """
        with self._lock:
            if self._is_closed:
                raise BatcherClosedError("asked after it was closed")
            future: concurrent.futures.Future[T] = concurrent.futures.Future()
            self._worker.put(lambda: _run_into(future, function))
        return future

    def set_policy(self, **fields: Any) -> None:
        """Replace fields of the policy, for the batches to come; from any thread.

        Raises:
            OptionTypeError: (``TypeError``) If a field has a wrong type.
            OptionError: (``ValueError``) If one is out of its bounds.
        """
        with self._lock:
            self.policy = replace(self.policy, **fields)

    # ---------------------------------------------------------------- ending

    def drop(self, reason: str = "the query was dropped before it was answered") -> int:
        """Settle every waiter with a ``QueryDroppedError``; return how many there were.

        A batch that is being evaluated runs to its end, and its results are not delivered.
        """
        with self._lock:
            entries = [*self._pending.values(), *self._in_flight.values()]
            self._pending.clear()
            settlements: list[Settlement] = [
                (waiter, None, QueryDroppedError(reason))
                for entry in entries
                for waiter in entry.waiters
            ]
            for entry in entries:
                entry.waiters = []
            self._is_urgent = False
        deliver(settlements)
        return len(settlements)

    def close(self) -> None:
        """Drop everybody and stop the worker thread; again has no effect.

        Waits for a batch that is being evaluated, so that nothing of it is in use afterwards.
        """
        with self._lock:
            self._is_closed = True
        self.drop("closed before the query was answered")
        self._worker.stop()

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` has been called."""
        return self._is_closed

    def statistics(self) -> BatcherStatistics:
        """Return the counts so far."""
        with self._lock:
            return BatcherStatistics(
                num_submitted=self._num_submitted,
                num_joined=self._num_joined,
                num_skipped=self._num_skipped,
                num_failed=self._num_failed,
                num_batches=sum(self._batch_sizes.values()),
                batch_sizes=MappingProxyType(dict(sorted(self._batch_sizes.items()))),
                num_pending=len(self._pending),
                num_in_flight=len(self._in_flight),
            )

    # ---------------------------------------------------------------- under the lock

    def _enqueue(self, query: Q, loop: asyncio.AbstractEventLoop | None) -> Waiter:
        if self._is_closed:
            raise BatcherClosedError("asked after it was closed")
        key = cast(Hashable, query) if self._key is None else self._key(query)
        entry = self._pending.get(key) or self._in_flight.get(key)
        if entry is None:
            entry = self._pending[key] = Entry(key, query)
            self._num_arrived += 1
        else:
            self._num_joined += 1
        waiter = Waiter(entry, loop)
        entry.waiters.append(waiter)
        self._num_submitted += 1
        return waiter

    def _advance(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Decide what becomes of the queue after a change that ``loop`` (or a thread) made."""
        state = BatchState(len(self._pending), self._is_busy, self._is_urgent)
        decision = self.policy.decide(state)
        if decision is Decision.FIRE:
            self._fire()
        elif decision is Decision.YIELD and loop is not None:
            ticker = self._tickers.get(loop)
            if ticker is None:
                self._forget_closed_loops()
                ticker = self._tickers[loop] = _LoopTicker()
            if not ticker.is_scheduled:
                ticker.is_scheduled = True
                ticker.restart(time.monotonic(), self._num_arrived)
                loop.call_soon(self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """One pass of ``loop``, while queries of its own or of others wait."""
        with self._lock:
            ticker = self._tickers[loop]
            ticker.num_passes += 1
            is_quiet = ticker.seen == self._num_arrived
            ticker.num_quiet_passes = ticker.num_quiet_passes + 1 if is_quiet else 0
            ticker.seen = self._num_arrived
            decision = self.policy.decide(
                BatchState(
                    num_pending=len(self._pending),
                    is_busy=self._is_busy,
                    is_urgent=self._is_urgent,
                    num_passes=ticker.num_passes,
                    num_quiet_passes=ticker.num_quiet_passes,
                    waited=time.monotonic() - ticker.since,
                )
            )
            if decision is Decision.YIELD:
                loop.call_soon(self._tick, loop)
                return
            ticker.is_scheduled = False
            if decision is Decision.FIRE:
                self._fire()

    def _fire(self) -> None:
        """Send the oldest queries that somebody still wants to the worker."""
        batch: list[Entry] = []
        limit = self.policy.max_batch_size  # once: another thread may set the policy meanwhile
        for key in list(self._pending):
            if len(batch) == limit:
                break
            entry = self._pending.pop(key)
            if any(waiter.is_waiting() for waiter in entry.waiters):
                batch.append(entry)
                self._in_flight[key] = entry
            else:
                self._num_skipped += 1
        if not self._pending:
            self._is_urgent = False
        if batch:
            self._is_busy = True
            self._batch_sizes[len(batch)] += 1
            self._worker.put(lambda: self._run(batch))

    def _forget_closed_loops(self) -> None:
        for loop in [loop for loop in self._tickers if loop.is_closed()]:
            del self._tickers[loop]

    # ---------------------------------------------------------------- on the worker thread

    def _run(self, batch: list[Entry]) -> None:
        results: Sequence[object] = ()
        error: BaseException | None = None
        try:
            results = self._evaluate([cast(Q, entry.query) for entry in batch])
            if len(results) != len(batch):
                error = EvaluationError(
                    f"evaluate returned {len(results)} results for {len(batch)} queries"
                )
        except BaseException as raised:  # everything must settle the futures, nothing else
            error = _presentable(raised)
        settlements: list[Settlement] = []
        with self._lock:
            for index, entry in enumerate(batch):
                del self._in_flight[entry.key]
                result = results[index] if error is None else None
                own = _presentable(result) if isinstance(result, Exception) else error
                self._num_failed += own is not None
                settlements.extend((waiter, result, own) for waiter in entry.waiters)
                # Or entry and waiters, pointing at each other, would keep the result until the
                # garbage collector comes by.
                entry.waiters = []
            self._is_busy = False
            # A full or urgent batch goes from here; the rest once its loop has gone quiet, so
            # that the callers answered now can still join it.
            self._advance(None)
            wake = [] if self._is_busy else self._loops_waiting()
        deliver(settlements)
        for loop in wake:
            call_threadsafe(loop, self._wake, loop)

    def _loops_waiting(self) -> list[asyncio.AbstractEventLoop]:
        waiters = (waiter for entry in self._pending.values() for waiter in entry.waiters)
        return list({waiter.loop: None for waiter in waiters if waiter.loop is not None})

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._advance(loop)

    def _forget(self, waiter: Waiter) -> None:
        """Take a cancelled caller off its query, and the query off the queue if it was the last."""
        with self._lock:
            entry = waiter.entry
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
            if not entry.waiters and self._pending.get(entry.key) is entry:
                del self._pending[entry.key]
                self._num_skipped += 1
                if not self._pending:
                    self._is_urgent = False


def _presentable(raised: BaseException) -> BaseException:
    """An exception that may be set on a future: not one that futures or loops treat specially."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = EvaluationError(f"the evaluation ended with {raised!r}")
    error.__cause__ = raised
    return error


def _run_into(future: concurrent.futures.Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():  # cancelled; from here on it cannot be
        return
    try:
        result = function()
    except BaseException as raised:
        future.set_exception(raised)
    else:
        future.set_result(result)
