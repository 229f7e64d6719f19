"""Batcher: groups concurrent queries into batches and returns results to their event loops.

**Flow.** ``submit`` adds a ``PendingQuery`` to ``_waiting``, a dictionary by key with the oldest
first. If ``_waiting``, or ``_running`` (the batch under evaluation), has an equal query, the caller
joins that. The policy decides when to send a batch. The worker thread moves the oldest queries to
``_running``, evaluates them without the lock, and settles each loop's futures by one callback.
Tests compare results with those of ``naive_batch`` in tests/naive.py.

**Invariants.** One lock guards both dictionaries. A query that no caller waits for leaves the
queue, at the latest when it would enter a batch. Ctrl-C never interrupts the worker thread, so the
thread that sends a batch only queues a call for the worker. After a Ctrl-C, there may be a surplus
call, which finds no queries, or a call may be missing, which the next caller queues. The garbage
collector may close a coroutine on any thread at any moment, so closing one sets a flag and takes no
lock. A lock belongs to the process that claims it, and raises an error in a fork, which has no
worker thread (``runtime/forks.py``).

**Why it waits for quiet.** After four turns of the event loop without a new query
(``quiet_turns``), runnable tasks have usually submitted their queries; an idle turn costs about 20
microseconds. The timeout and ``max_turns`` are for programs that never pause. After a batch, its
callers get the same turns to add queries to those that arrived during it, unless the latter fill a
batch.

**Cancellation.** ``evaluate`` sees no futures. Between two steps it may call ``check_cancelled``,
which raises once no caller of its batch is left. If new callers join some of the queries after
that, these queries return to the head of the queue. They are sent at once, since they have waited
for an evaluation already. At most every 0.1 s, ``check_cancelled`` wakes the callers' loops: a
signal (a notebook's stop button) may have cancelled a task, and nothing else would wake its loop.

**Costs.** A caller of one query is represented by its future, and a caller of several by one
``MultiWaiter``: with an object per query, garbage collection made 1,024 awaits 30 % slower. The
policy is not consulted for a query from a loop while the worker is busy, or while the loop has a
turn scheduled and the batch is neither full nor flushed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Generic, TypeVar, final

from genlm_backend.batching.histogram import Durations
from genlm_backend.batching.pending_query import (
    Answers,
    Caller,
    Loop,
    MultiWaiter,
    PendingQuery,
    answers_of,
    are_wanted,
    as_weight,
    deliver,
    evaluated,
    is_error,
    leave,
    presentable,
    unwanted,
)
from genlm_backend.batching.policy import (
    BatcherStatistics,
    BatchPolicy,
    BatchState,
    Decision,
    QuietDetector,
)
from genlm_backend.batching.worker import Worker
from genlm_backend.checks import function, instance, optional, text
from genlm_backend.errors import BatcherClosedError, OptionTypeError, QueryDroppedError
from genlm_backend.runtime.forks import ProcessLock
from genlm_backend.runtime.threads import call_threadsafe

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_POLICY = instance(BatchPolicy, "a BatchPolicy")


class Batcher(Generic[Q, R]):
    """Coalesces concurrent queries into batches and evaluates them on one worker thread.

    ``evaluate`` is an ordinary function that returns one result per query of a list of distinct
    queries. Calls of it never overlap. While it runs, the event loops are free, and new queries
    wait for a later batch. Any number of event loops and threads may share a batcher. Concurrent
    queries with equal keys share one result object: copy it before you modify it.

    Cancelling a caller does not affect the others; its query, if not sent yet, is evaluated only if
    another caller waits for it. A long ``evaluate`` should call ``check_cancelled()`` between its
    steps; that raises once no caller is left. An exception that ``evaluate`` raises goes to all
    callers of the batch; one that it returns as a result goes to the callers of that query.

    A batcher belongs to the process that first uses it; in a fork it raises a ``ForkedError``.

    Args:
        evaluate: The function that the worker thread calls with each batch.
        policy: The bounds on the size and the age of a batch.
        key: Returns a query's key; its exceptions go to the caller. Default: the query itself.
        weight: Returns how much a query counts toward ``max_batch_size``, zero or more; its
            exceptions go to the caller. A query that exceeds the maximum is sent alone, or only
            with queries of its ``forward_key``. Default: 1.
        forward_key: Returns the key of the computation that answers a query; queries that share it
            count once in a batch. Default: each query counts.
        name: Name in error messages and, after ``genlm-``, of the thread.

    Raises:
        OptionTypeError: (``TypeError``) If an argument has a wrong type.
    """

    def __init__(
        self,
        evaluate: Callable[[list[Q]], Sequence[R | Exception]],
        policy: BatchPolicy | None = None,
        key: Callable[[Q], Hashable] | None = None,
        name: str = "batcher",
        weight: Callable[[Q], float] | None = None,
        forward_key: Callable[[Q], Hashable] | None = None,
    ) -> None:
        self._evaluate = function("evaluate", evaluate)
        if any(map(inspect.iscoroutinefunction, (evaluate, type(evaluate).__call__))):
            name = getattr(evaluate, "__name__", type(evaluate).__name__)
            raise OptionTypeError(
                "evaluate must be an ordinary function, since it runs on a worker thread: write "
                f"{name} without async"
            )
        self.policy = optional(_POLICY)("policy", policy) or BatchPolicy()
        self._key = optional(function)("key", key)
        self._weight = optional(function)("weight", weight)
        self._forward_key = optional(function)("forward_key", forward_key)
        self._name = text("name", name)
        self._worker, self._lock = Worker(f"genlm-{name}"), ProcessLock()
        self._is_wanted: Callable[[], bool] | None = None  # whether callers await the worker's task
        self._last_wake = self._began = 0.0  # by time.monotonic
        self._given_up: QueryDroppedError | None = None  # set by ``check_cancelled``
        self._is_closed = False
        self._fences: dict[_Call[Any], int] = {}  # queued call → number of the first query after it
        self._waiting: dict[Hashable, PendingQuery] = {}  # the queue, oldest first
        self._running: dict[Hashable, PendingQuery] = {}  # the batch under evaluation
        self._loops: set[Loop] = set()  # loops of callers, including some callers that have left
        self._quiet_detectors: dict[asyncio.AbstractEventLoop, QuietDetector] = {}
        self._is_busy = self._flush_requested = False
        self._num_arrived = 0
        self._num_submitted = self._num_joined = self._num_skipped = self._num_failed = 0
        self._batch_sizes: Counter[int] = Counter()
        self._queue_time, self._batch_time = Durations(), Durations()

    # ---------------------------------------------------------------- submitting

    async def submit(self, query: Q) -> R:
        """Return the result for ``query``, evaluated in a batch with the other waiting queries.

        Raises:
            BatcherClosedError: After ``close()``, or when the interpreter has ended the worker.
            ForkedError: In a fork of the batcher's process.
            QueryDroppedError: If ``drop()`` or ``close()`` came before the result.
            Exception: Any error that ``evaluate`` raised for the batch or returned for the query,
                that ``key`` or ``weight`` raised, or that ``drop`` was given.
        """
        loop = asyncio.get_running_loop()
        future, asked = loop.create_future(), None
        try:
            asked = self._ask(future, loop, (query,))
            return await future
        except BaseException as error:
            self._leave(future, asked, error)
            raise
        finally:
            del future, asked  # or they and the error's frame would form a reference cycle

    async def submit_all(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, in order, or raise the first error among them.

        After an error, queries not sent yet are evaluated only if other callers wait for them.
        Raises what ``submit`` raises.
        """
        waiter = MultiWaiter(asyncio.get_running_loop())
        try:
            asked = self._ask(waiter, waiter.loop, queries)
            return await waiter.future if asked else []
        except BaseException as error:
            self._leave(waiter, waiter.queries, error)
            raise
        finally:
            del waiter

    def submit_sync(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, in order, blocking this thread.

        They are sent with the other waiting queries, as soon as the worker is free. Inside a
        running event loop, this blocks the loop.

        Raises:
            RuntimeError: When called from within ``evaluate``, where it would deadlock.
            Exception: Any error of ``submit``.
        """
        if self._worker.is_current_thread():
            raise RuntimeError("evaluate() cannot wait for its own batcher")
        waiter = MultiWaiter(None)
        try:
            asked = self._ask(waiter, None, queries)
            return waiter.future.result() if asked else []
        except BaseException as error:
            waiter.future.cancel()
            self._leave(waiter, waiter.queries, error)
            raise
        finally:
            del waiter

    def flush(self) -> None:
        """Send all waiting queries now, or as soon as the worker is free."""
        with self._lock.here:
            if self._waiting:
                self._flush_requested = True
                self._advance(None)

    def drain(self) -> None:
        """Block until no query submitted before this call is waiting or being evaluated."""
        with self._lock.here:
            stop = self._num_arrived

        def is_done() -> bool:
            with self._lock.here:
                return next((q.number for q in self._waiting.values()), stop) >= stop

        while not self.call(is_done):
            self.flush()

    def set_policy(self, **fields: Any) -> None:
        """Replace fields of the policy for later batches; any thread may call this.

        Raises:
            OptionTypeError: (``TypeError``) If a field has a wrong type.
            OptionError: (``ValueError``) If a field is out of its bounds.
        """
        with self._lock.here:
            self.policy = replace(self.policy, **fields)

    # ---------------------------------------------------------------- ending

    def drop(self, reason: str | Exception = "the query was dropped before it was answered") -> int:
        """Raise a ``QueryDroppedError`` with ``reason`` in all callers; return their number.

        A batch under evaluation ends at its next ``check_cancelled()``; if it never calls that, its
        results are discarded. If ``reason`` is an exception, only callers of queued queries get it,
        and the batch under evaluation continues.
        """
        error = reason if isinstance(reason, Exception) else QueryDroppedError(reason)
        with self._lock.here:
            answers = self._refused(error, () if error is reason else self._running.values())
        deliver(answers)
        return sum(map(len, answers.values()))

    def close(self) -> None:
        """Drop all queries and stop the worker thread; a second call has no effect.

        Blocks until the thread has ended; a batch under evaluation ends early if it calls
        ``check_cancelled()``. In a fork, ``close`` has no effect.
        """
        if self._lock.is_foreign:
            return
        with self._lock.here:
            self._is_closed = True
        self.drop(f"{self._name} was closed before the query was answered")
        self._worker.stop()

    def statistics(self) -> BatcherStatistics:
        """Return the counts and durations so far."""
        with self._lock.here:
            self._prune(unwanted(self._waiting.values()))
            return BatcherStatistics(
                num_submitted=self._num_submitted,
                num_joined=self._num_joined,
                num_skipped=self._num_skipped,
                num_failed=self._num_failed,
                num_batches=sum(self._batch_sizes.values()),
                batch_sizes=dict(sorted(self._batch_sizes.items())),
                num_pending=len(self._waiting),
                num_in_flight=len(self._running),
                queue_time_seconds=self._queue_time.histogram(),
                batch_time_seconds=self._batch_time.histogram(),
            )

    # ---------------------------------------------------------------- calls on the worker

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the worker thread after the batches already sent; return its result.

        A query submitted after the call is evaluated after it, unless an equal query is pending
        already. An interrupt of this thread before the function starts cancels the call.
        If this thread is the worker thread, the function runs at once.
        Raises what ``check_open`` or the function raises.
        """
        if self._worker.is_current_thread():
            return function()
        call = self._put(function)
        try:
            return call.future.result()
        except BaseException:  # interrupted, or the error of the function
            call.is_wanted = False
            call.future.cancel()
            raise
        finally:
            del call

    def call_soon(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run ``function`` on the worker thread after the batches already sent; see ``call``.

        Returns:
            A future of the result or exception; cancel it before the call starts to skip the call.
        """
        return self._put(function).future

    def _put(self, function: Callable[[], T]) -> _Call[T]:
        call = _Call(function)
        with self._lock.here:
            self.check_open()
            self._worker.put(partial(self._run_call, call))
            # Last: if an interrupt left a fence without its call, the queue would stop for good.
            self._fences[call] = self._num_arrived
        return call

    def check_open(self) -> None:
        """Raise the error that ``submit`` would raise now.

        Raises:
            BatcherClosedError: After ``close()``, or when the interpreter has ended the worker.
            ForkedError: In a fork of the batcher's process.
        """
        self._lock.claim()
        if self._is_closed:
            raise BatcherClosedError(f"{self._name} has been closed and accepts no more calls")
        if self._worker.is_stopped:
            raise BatcherClosedError(f"{self._name} cannot answer: the interpreter is exiting")

    def check_cancelled(self) -> None:
        """Raise an error if no caller waits any more for the worker thread's current task.

        ``evaluate``, or a function given to ``call``, calls this between two steps of long work and
        lets the error propagate. Callers of queries see it only at interpreter exit; those who join
        after it was raised are answered by another batch. On other threads, this has no effect.

        Raises:
            QueryDroppedError: If no caller is left, at ``close()``, and at interpreter exit.
        """
        if not self._worker.is_current_thread():
            return
        with self._lock.here:
            is_given_up = self._is_ending()
            is_given_up = is_given_up or (self._is_wanted is not None and not self._is_wanted())
            self._wake_loops(is_given_up)
            if is_given_up:
                is_exit = self._worker.is_stopped and not self._is_closed
                why = ": the interpreter is exiting" if is_exit else ""
                said = f"the evaluation ended before the query was answered{why}"
                self._given_up = QueryDroppedError(said)
                raise self._given_up

    def _wake_loops(self, is_given_up: bool) -> None:
        """Wake the callers' loops, at most every ``_WAKE_SECONDS`` unless the task is given up."""
        now = time.monotonic()
        if is_given_up or now - self._last_wake >= _WAKE_SECONDS:
            self._last_wake = now
            for loop in self._loops:
                if loop is not None:
                    call_threadsafe(loop, _nothing)

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the batcher's process."""
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
        self._is_wanted = partial(getattr, call, "is_wanted")
        if call.is_wanted and call.future.set_running_or_notify_cancel():
            try:  # the future cannot be cancelled from here on
                call.future.set_result(call.function())
            except BaseException as raised:
                call.future.set_exception(presentable(raised))
        self._is_wanted = self._given_up = None
        del call  # or a traceback's reference to this frame would keep it alive

    # ---------------------------------------------------------------- callers and the queue

    def _ask(self, caller: Caller, loop: Loop, queries: Iterable[Q]) -> list[PendingQuery]:
        """Enter queries for a caller; return their ``PendingQuery`` objects."""
        queries = tuple(queries)  # before the lock: the iterable may be slow or call the batcher
        asked = caller.queries if type(caller) is MultiWaiter else []
        with self._lock.here:
            if self._is_closed or self._worker.is_stopped:
                self.check_open()
            now = time.monotonic()
            for query in queries:
                asked.append(self._enter(caller, query, now))
                self._num_submitted += 1
            self._loops.add(loop)
            if loop is None:
                # False if no query waits: all have joined the batch under evaluation.
                self._flush_requested = bool(self._waiting)
                self._advance(None)
            elif queries and not self._is_busy:
                # A scheduled turn of the loop decides, unless the batch is full or flushed.
                detector = self._quiet_detectors.get(loop)
                is_full = len(self._waiting) >= self.policy.max_batch_size
                if detector is None or is_full or self._flush_requested or not detector.is_coming:
                    self._advance(loop)
        return asked

    def _enter(self, caller: Caller, query: Q, now: float) -> PendingQuery:
        """Join the caller to an equal pending query, or queue a new one; return that query."""
        key: Any = query if self._key is None else self._key(query)
        pending = self._running.get(key) if self._running else None
        if pending is None:
            weight = 1.0 if self._weight is None else self._weight(query)
            if type(weight) is not float or not weight >= 0:
                weight = as_weight(weight)
            new = PendingQuery(key, query, weight, self._num_arrived, caller, now)
            pending = self._waiting.setdefault(key, new)
            if pending is new:
                self._num_arrived += 1
                if type(caller) is MultiWaiter:
                    caller.num_missing += 1
                return new
        self._num_joined += 1
        if pending.join(caller) and type(caller) is MultiWaiter:
            caller.num_missing += 1
        return pending

    def _leave(
        self, caller: Caller, queries: list[PendingQuery] | None, error: BaseException
    ) -> None:
        """Remove a caller from its queries, and dequeue those without other callers."""
        leave(caller.future if type(caller) is MultiWaiter else caller)
        if isinstance(error, GeneratorExit):
            return  # from the garbage collector, perhaps on a thread that holds the lock
        with self._lock.here:
            for query in queries or ():
                if query.leave(caller) and self._waiting.get(query.key) is query:
                    self._prune([query])
            if queries:
                queries.clear()  # the error's traceback would keep their results
            self._flush_requested = self._flush_requested and bool(self._waiting)

    def _prune(self, queries: Iterable[PendingQuery]) -> None:
        """Remove queries without callers from the queue."""
        for query in queries:
            if self._waiting.get(query.key) is query:
                del self._waiting[query.key]
            else:  # the key's hash has changed, so that the lookup fails
                self._waiting = {k: q for k, q in self._waiting.items() if q is not query}
            self._num_skipped += 1

    def _advance(self, loop: Loop) -> None:
        """Apply the policy after a change of state; ``loop`` is ``None`` outside of event loops."""
        state = BatchState(len(self._waiting), self._is_busy, self._flush_requested)
        decision = self.policy.decide(state)
        if decision is Decision.FIRE:
            self._fire()
        elif decision is Decision.YIELD and loop is not None:
            if loop not in self._quiet_detectors:
                for closed in [other for other in self._quiet_detectors if other.is_closed()]:
                    del self._quiet_detectors[closed]
                self._quiet_detectors[loop] = QuietDetector()
            detector = self._quiet_detectors[loop]
            if not detector.is_coming:
                detector.start(self._num_arrived)
                loop.call_soon(self._tick, loop)
                detector.is_scheduled = True

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Apply the policy at a scheduled turn of ``loop``."""
        try:
            self._turn(loop)
        except (KeyboardInterrupt, SystemExit):
            loop.call_soon(self._tick, loop)  # a caller may run the loop again
            raise

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock.here:
            detector = self._quiet_detectors[loop]
            detector.is_scheduled = False
            state = detector.tick(
                self._num_arrived, len(self._waiting), self._is_busy, self._flush_requested
            )
            decision = self.policy.decide(state)
            if decision is Decision.YIELD:
                loop.call_soon(self._tick, loop)
                detector.is_scheduled = True
            elif decision is Decision.FIRE:
                self._fire()

    def _fire(self) -> None:
        """Queue a call by which the worker takes and evaluates a batch."""
        # Ctrl-C may interrupt this anywhere. If the call is missing, the next caller queues it; one
        # call too many finds an empty queue.
        try:
            self.check_open()  # also claims the lock for this process, which then owns the thread
            self._worker.put(self._run)
        except RuntimeError as error:  # the worker thread has ended or cannot be started
            deliver(self._refused(error))
        else:
            self._is_busy = True

    def _refused(self, error: BaseException, running: Iterable[PendingQuery] = ()) -> Answers:
        """Empty the queue; return the error as the answer to its queries and to ``running``."""
        waiting, self._waiting, self._flush_requested = self._waiting, {}, False
        return answers_of((query, error) for query in (*waiting.values(), *running))

    def _take(self) -> dict[Hashable, PendingQuery]:
        """Move the next batch from the queue to the running queries, and return it."""
        queries = self._oldest()
        while gone := unwanted(queries):
            self._prune(gone)
            queries = self._oldest()
        if len(queries) == len(self._waiting):
            batch, self._waiting = self._waiting, {}
        else:
            batch = {query.key: self._waiting.pop(query.key) for query in queries}
        self._running = batch
        self._flush_requested = self._flush_requested and bool(self._waiting)
        self._batch_sizes.update([len(batch)] if batch else [])
        return batch

    def _oldest(self) -> list[PendingQuery]:
        """Return the oldest queries, up to a full batch and up to the first queued call."""
        most, waiting = self.policy.max_batch_size, self._waiting.values()
        fence = next(iter(self._fences.values()), self._num_arrived)  # the first is the lowest
        are_few = fence == self._num_arrived and len(waiting) <= most
        if are_few and sum([query.weight for query in waiting]) <= most:
            return [*waiting]
        total, forwards, queries = 0.0, set[Hashable](), list[PendingQuery]()
        for query in waiting:
            if query.number >= fence:
                break
            forward = query.number if self._forward_key is None else self._forward_key(query.query)
            if forward not in forwards:
                total += query.weight
                if forwards and total > most:
                    break
                forwards.add(forward)
            queries.append(query)
        return queries

    # ---------------------------------------------------------------- on the worker thread

    def _run(self) -> None:
        try:
            with self._lock.here:
                self._is_busy = True
                batch, self._began = self._take(), time.monotonic()
                if batch:
                    oldest = next(iter(batch.values()))
                    self._queue_time.add(self._began - oldest.arrived)
            self._is_wanted = partial(are_wanted, batch.values())
            queries = [pending.query for pending in batch.values()]
            self._settle(batch, *evaluated(self._evaluate, queries))
            del batch, queries  # or a traceback's reference to this frame would keep them alive
        except BaseException as raised:  # for example, a key's hash has changed
            with self._lock.here:
                answers = self._refused(presentable(raised), self._running.values())
                self._is_wanted, self._given_up, self._running = None, None, {}
                self._is_busy = False
            deliver(answers)

    def _settle(
        self, batch: dict[Hashable, PendingQuery], results: list[R], error: BaseException | None
    ) -> None:
        with self._lock.here:
            if batch:
                self._batch_time.add(time.monotonic() - self._began)
            is_given_up = error is not None and error is self._given_up and not self._is_ending()
            self._is_wanted, self._given_up, self._running = None, None, {}
            answers: Answers = {}
            if is_given_up:  # queries that callers joined since ``check_cancelled`` are sent again
                joined = {key: query for key, query in batch.items() if query.callers}
                self._waiting = joined | self._waiting
                self._flush_requested = self._flush_requested or bool(joined)
            else:
                given = results if error is None else [error] * len(batch)
                if any(issubclass(kind, Exception) for kind in set(map(type, given))):
                    self._num_failed += sum(map(is_error, given))
                answers = answers_of(zip(batch.values(), given, strict=True))
            self._is_busy = False
            # A full or flushed batch is sent now. Other queries wait until their loop is quiet, so
            # that the callers that get results now can add their next ones.
            self._advance(None)
            wake = list[Loop]() if self._is_busy or not self._waiting else [*self._loops]
            self._loops = {own for own in self._loops if own is not None and not own.is_closed()}
            if not self._waiting:
                self._loops = set()
        deliver(answers)
        for loop in wake:
            if loop is not None:
                call_threadsafe(loop, self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock.here:
            self._advance(loop)


@final
class _Call(Generic[T]):
    """A function that the worker thread runs between two batches."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function, self.is_wanted = function, True
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()


_WAKE_SECONDS: Final = 0.1
"""Shortest time in seconds between two wake-ups of loops during a long evaluation."""


def _nothing() -> None:
    return None
