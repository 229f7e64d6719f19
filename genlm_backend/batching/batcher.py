"""Batcher: concurrent queries in, batches out, results back to their event loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar, cast, final

from genlm_backend.batching.pending_batch import (
    Answers,
    Caller,
    Loop,
    MultiWaiter,
    PendingBatch,
    as_weight,
    deliver,
    evaluated,
    has_errors,
    is_error,
    leave,
    presentable,
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
from genlm_backend.runtime.background_loop import call_threadsafe
from genlm_backend.runtime.forks import ProcessLock

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_POLICY = instance(BatchPolicy, "a BatchPolicy")


class Batcher(Generic[Q, R]):
    """Coalesces concurrent queries into batches and evaluates them on one worker thread.

    ``evaluate`` is an ordinary function from a list of distinct queries to as many results; it
    knows no futures and is never called twice at once. While it runs, the event loops are free
    and new queries gather; they go when it returns. Any number of event loops and threads may
    use one batcher. Equal keys share one result object: whoever hands results on as something
    to be modified copies them first.

    A caller that is cancelled disturbs nobody, and its query is not evaluated unless somebody
    else wants it. An ``evaluate`` that takes long calls ``check_cancelled()`` between its steps,
    and ends where nobody is left. An exception out of ``evaluate`` reaches the callers of that
    batch and no one else; one that it returns in place of a result, the callers of that query.

    It belongs to the process that first asks it; a fork of that process gets a ``ForkedError``.

    Args:
        evaluate: Called on the worker thread with queries that weigh as much as the policy allows.
        policy: When a batch goes.
        key: Queries with equal keys are one query; what it raises refuses one. Default: the query.
        weight: What a query counts for in a batch, zero or more and 1 by default; what it raises
            refuses one. One too heavy for any goes alone.
        forward_key: What the result of a query is computed with: of the queries of a batch with
            equal values the first alone counts. Default: each counts.
        name: What errors call it, and debuggers the thread, with ``genlm-`` before it.

    Raises:
        OptionTypeError: (``TypeError``) If one of them is of another type.
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
                "evaluate runs on a worker thread and must be an ordinary function: write "
                f"{name} without async"
            )
        self.policy = optional(_POLICY)("policy", policy) or BatchPolicy()
        self._key = optional(function)("key", key)
        self._weight = optional(function)("weight", weight)
        self._forward_key = optional(function)("forward_key", forward_key)
        self._name = text("name", name)
        self._worker, self._lock = Worker(f"genlm-{name}"), ProcessLock()
        self._is_wanted: Callable[[], bool] | None = None  # what the worker is at
        self._sleepers: Set[Loop] = frozenset()  # loops of those who wait for it
        self._last_wake = 0.0
        self._given_up: QueryDroppedError | None = None  # what has ended it
        self._is_closed = False
        self._fences: dict[_Call[Any], int] = {}  # calls that are queued: the query after each
        self._waiting, self._running = (
            PendingBatch(0),
            PendingBatch(0),
        )  # the queue, and what is evaluated
        self._numbers: dict[Hashable, int] = {}  # of the queries of both, by key
        self._quiet_detectors: dict[asyncio.AbstractEventLoop, QuietDetector] = {}
        self._is_busy = self._flush_requested = False
        self._num_arrived = 0
        self._num_submitted = self._num_joined = self._num_skipped = self._num_failed = 0
        self._batch_sizes: Counter[int] = Counter()

    # ---------------------------------------------------------------- asking

    async def submit(self, query: Q) -> R:
        """Return the result for ``query``, evaluated together with whatever else is waiting.

        Raises:
            BatcherClosedError: After ``close()``, or when the interpreter has ended the worker.
            ForkedError: In a fork of the process that it belongs to.
            QueryDroppedError: If ``drop()`` or ``close()`` came first.
            Exception: What ``evaluate`` raised for this query's batch.
        """
        loop = asyncio.get_running_loop()
        future, numbers = loop.create_future(), None
        try:
            numbers = self._ask(future, loop, (query,))
            return await future
        except BaseException as error:
            self._leave(future, numbers, error)
            raise

    async def submit_all(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, in order, or the first error that one of them meets.

        What is still waiting of them then, and is nobody else's, is not evaluated. Raises what
        ``submit`` does.
        """
        caller, numbers = MultiWaiter(asyncio.get_running_loop()), None
        try:
            numbers = self._ask(caller, caller.loop, queries)
            return await caller.future if numbers else []
        except BaseException as error:
            self._leave(caller, numbers, error)
            raise

    def submit_sync(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, blocking this thread; full batches where they fit.

        Nothing is waited for: what is pending goes along at once. Safe inside a running event
        loop, which stands still meanwhile.

        Raises:
            RuntimeError: When called from within ``evaluate``, which could never end.
            Exception: As ``submit``, for one of the batches.
        """
        if self._worker.is_current_thread():
            raise RuntimeError("evaluate() cannot wait for its own batcher")
        caller, numbers = MultiWaiter(None), None
        try:
            numbers = self._ask(caller, None, queries)
            return caller.future.result() if numbers else []
        except BaseException as error:
            caller.future.cancel()
            self._leave(caller, numbers, error)
            raise

    def flush(self) -> None:
        """Let everything that waits go now, or as soon as the worker is free."""
        with self._lock.here:
            if self._waiting:
                self._flush_requested = True
                self._advance(None)

    def drain(self) -> None:
        """Block until everything that has been asked so far is answered."""
        with self._lock.here:
            stop = self._waiting.stop
        while not self.call(lambda: self._waiting.first >= stop or not self._waiting):
            self.flush()

    def set_policy(self, **fields: Any) -> None:
        """Replace fields of the policy, for the batches to come; from any thread.

        Raises:
            OptionTypeError: (``TypeError``) If a field has a wrong type.
            OptionError: (``ValueError``) If one is out of its bounds.
        """
        with self._lock.here:
            self.policy = replace(self.policy, **fields)

    # ---------------------------------------------------------------- ending

    def drop(self, reason: str | Exception = "the query was dropped before it was answered") -> int:
        """Settle every waiter with a ``QueryDroppedError``; return how many there were.

        A batch that is being evaluated ends at its next ``check_cancelled()``, and the results of
        one that does not ask are not delivered. Given an error in place of the reason, those who
        still wait for a batch get that, and no others.
        """
        error = reason if isinstance(reason, Exception) else QueryDroppedError(reason)
        with self._lock.here:
            begun = () if error is reason else (self._running,)
            answers = self._refused(error, begun)
        deliver(answers)
        return sum(len(futures) for _, futures, _ in answers)

    def close(self) -> None:
        """Drop everybody and stop the worker thread; again has no effect.

        Waits for a batch that is being evaluated to end or to ask whether it is wanted, so that
        nothing of it is in use afterwards. In a fork it has no effect either.
        """
        if self._lock.is_foreign:
            return
        with self._lock.here:
            self._is_closed = True
        self.drop(f"{self._name} was closed before the query was answered")
        self._worker.stop()

    def statistics(self) -> BatcherStatistics:
        """Return the counts so far."""
        with self._lock.here:
            self._prune(self._waiting.gone())
            return BatcherStatistics(
                num_submitted=self._num_submitted,
                num_joined=self._num_joined,
                num_skipped=self._num_skipped,
                num_failed=self._num_failed,
                num_batches=sum(self._batch_sizes.values()),
                batch_sizes=dict(sorted(self._batch_sizes.items())),
                num_pending=len(self._waiting),
                num_in_flight=len(self._running.evaluated),
            )

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
            self._fences[call] = self._waiting.stop
        return call

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

    def check_cancelled(self) -> None:
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
        """Wake the loops of waiting callers from time to time."""
        now = time.monotonic()
        if is_given_up or now - self._last_wake >= _WAKE_SECONDS:
            self._last_wake = now
            for loop in [*self._sleepers]:
                if loop is not None:
                    call_threadsafe(loop, _nothing)

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

    # ---------------------------------------------------------------- coming and going

    def _ask(self, caller: Caller, loop: Loop, queries: Iterable[Q]) -> Sequence[int]:
        """Enter a caller's queries; return their numbers."""
        queries = tuple(queries)  # an iterable of its caller's may take long, or ask us
        numbers: Sequence[int] = ()
        with self._lock.here:
            if self._is_closed or self._worker.is_stopped:
                self.check_open()
            if len(queries) > 1:
                numbers = self._enter_all(caller, loop, queries)
            numbers = numbers or [self._enter(caller, loop, query) for query in queries]
            self._num_submitted += len(numbers)
            if type(caller) is MultiWaiter:
                caller.wait_for(numbers)
            if loop is None:
                # Nothing to hurry where all of them joined what is under evaluation.
                self._flush_requested = bool(self._waiting)
                self._advance(None)
            elif numbers and max(numbers) >= self._waiting.first and not self._is_busy:
                # While the loop's next turn is coming, that decides, but for a full batch.
                detector = self._quiet_detectors.get(loop)
                is_full = len(self._waiting) >= self.policy.max_batch_size
                if detector is None or is_full or self._flush_requested or not detector.is_coming:
                    self._advance(loop)
        return numbers

    def _enter_all(self, caller: Caller, loop: Loop, queries: tuple[Q, ...]) -> Sequence[int]:
        """Enter many queries at once; return no numbers if one of them is not new."""
        key, weight = self._key, self._weight
        keys = cast(list[Hashable], [*queries] if key is None else [key(q) for q in queries])
        if len(set(keys)) < len(keys) or not self._numbers.keys().isdisjoint(keys):
            return ()
        weights = () if weight is None else [weight(query) for query in queries]
        if self._waiting.weights or not all(type(w) is float and w == 1.0 for w in weights):
            return ()
        waiting = self._waiting
        waiting.loops.add(loop)
        numbers = waiting.add_all(keys, queries, caller)
        self._numbers.update(zip(keys, numbers, strict=True))
        self._num_arrived += len(numbers)
        return numbers

    def _enter(self, caller: Caller, loop: Loop, query: Q) -> int:
        key: Any = query if self._key is None else self._key(query)
        number = self._numbers.get(key)
        if number is not None and (joined := self._batch_of(number)) is not None:
            joined.loops.add(loop)
            joined.join(number, caller)
            self._num_joined += 1
            return number
        weight = 1.0 if self._weight is None else self._weight(query)
        if type(weight) is not float or not weight >= 0:
            weight = as_weight(weight)
        waiting = self._waiting
        waiting.loops.add(loop)
        number = self._numbers[key] = waiting.add(key, query, weight, caller)
        self._num_arrived += 1
        return number

    def _batch_of(self, number: int) -> PendingBatch | None:
        """Return the round that a query is in; ``None`` for one that has been answered."""
        waiting, running = self._waiting, self._running
        if waiting.first <= number < waiting.stop:
            return waiting
        return running if number - running.first in running.evaluated else None

    def _leave(self, caller: Caller, numbers: Iterable[int] | None, error: BaseException) -> None:
        """Take a caller off its queries, and those that it was the last caller of off the queue."""
        leave(caller.future if type(caller) is MultiWaiter else caller)
        if isinstance(error, GeneratorExit):
            return  # the garbage collector's, maybe where its thread holds the lock
        with self._lock.here:
            for number in numbers or ():
                left = self._batch_of(number)
                if left is not None and left.leave(number, caller) and left is self._waiting:
                    self._prune((number,))
            self._flush_requested = self._flush_requested and bool(self._waiting)

    def _prune(self, numbers: Iterable[int]) -> None:
        """Take queries that no caller waits for off the queue."""
        for number in numbers:
            self._numbers.pop(self._waiting.forget(number), None)
            self._num_skipped += 1
        if not self._waiting:
            self._waiting = PendingBatch(self._waiting.stop)

    def _advance(self, loop: Loop) -> None:
        """Decide what becomes of the queue after a change that ``loop`` (or a thread) made."""
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
        """Take a turn of ``loop``, while queries of its own or of others wait."""
        try:
            self._turn(loop)
        except (KeyboardInterrupt, SystemExit):
            loop.call_soon(self._tick, loop)  # it may be run again
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
        """Have the worker take a batch."""
        # A thread may be interrupted anywhere in here: the next caller puts a call that is missing,
        # and one too many finds nothing to do.
        try:
            self.check_open()  # which claims the lock, for the thread is here
            self._worker.put(self._run)
        except RuntimeError as error:  # there is no thread any more, or none to be had
            deliver(self._refused(error))
        else:
            self._is_busy = True

    def _refused(self, error: BaseException, begun: Iterable[PendingBatch] = ()) -> list[Answers]:
        """Empty the queue; return who gets the error, callers of a batch that has begun too."""
        queue, self._waiting, self._flush_requested = (
            self._waiting,
            PendingBatch(self._waiting.stop),
            False,
        )
        for key in queue.keys:
            self._numbers.pop(key, None)
        return [answers for batch in (queue, *begun) for answers in batch.refused(error)]

    def _take(self) -> PendingBatch:
        while gone := self._waiting.gone(size := self._size()):
            self._prune(gone)
        batch = self._running = self._waiting.cut(size)
        self._flush_requested = self._flush_requested and bool(self._waiting)
        self._batch_sizes.update([len(batch)] if len(batch) else [])
        return batch

    def _size(self) -> int:
        """Return how many of the oldest queries go: none that came after a queued call."""
        size = self._waiting.size(self.policy.max_batch_size, self._forward_key)
        fence = next(iter(self._fences.values()), None)  # the first is the lowest
        return size if fence is None else min(size, max(0, fence - self._waiting.first))

    # ---------------------------------------------------------------- on the worker thread

    def _run(self) -> None:
        try:
            with self._lock.here:
                self._is_busy = True
                batch = self._take()
            self._is_wanted, self._sleepers = batch.is_wanted, batch.loops
            self._settle(batch, *evaluated(self._evaluate, batch.wanted_queries))
        except BaseException as raised:  # of a key that has changed, say: nobody waits for ever
            self._fail(presentable(raised))

    def _settle(self, batch: PendingBatch, results: list[R], error: BaseException | None) -> None:
        with self._lock.here:
            is_given_up = error is not None and error is self._given_up and not self._is_ending()
            self._is_wanted, self._given_up, self._sleepers = None, None, frozenset()
            self._running = PendingBatch(batch.stop)
            if is_given_up:
                self._put_back(batch)
                answers = []
            else:
                self._forget(batch)
                given = results if error is None else [error] * len(batch.evaluated)
                if has_errors(given):
                    self._num_failed += sum(map(is_error, given))
                answers = batch.answered(given)
            self._is_busy = False
            # A full or urgent batch goes from here; the rest once its loop has gone quiet, so
            # that the callers answered now can still join it.
            self._advance(None)
            wake = [] if self._is_busy or not self._waiting else list(self._waiting.loops)
        deliver(answers)
        for loop in wake:
            if loop is not None:
                call_threadsafe(loop, self._wake, loop)

    def _forget(self, batch: PendingBatch) -> None:
        """Let queries that equal those of a batch be evaluated anew."""
        if not self._waiting:
            self._numbers.clear()
            return
        for number, key in enumerate(batch.keys, batch.first):
            if self._numbers.get(key) == number:
                self._numbers.pop(key, None)

    def _put_back(self, batch: PendingBatch) -> None:
        """Return an abandoned batch to the queue, for callers that have come since."""
        self._forget(batch)
        for number, key in enumerate(batch.keys, batch.first):
            if batch.callers[number - batch.first] is not None:
                self._numbers[key] = number
                self._flush_requested = True
        self._waiting.put_back(batch)

    def _fail(self, error: BaseException) -> None:
        with self._lock.here:
            answers = self._refused(error, (self._running,))
            self._is_wanted, self._given_up, self._sleepers = None, None, frozenset()
            self._numbers, self._is_busy = {}, False
            self._running = PendingBatch(self._waiting.first)
        deliver(answers)

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
"""Seconds between two times that loops are woken during a long evaluation."""


def _nothing() -> None:
    return None
