"""The library's only event-loop code: queries in, batches out, results back to their loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast, final

from genlm_backend.batching.calling import Calling
from genlm_backend.batching.garbage import fewer_collections
from genlm_backend.batching.policy import BatchPolicy, BatchState, Decision
from genlm_backend.batching.statistics import BatcherStatistics, Counts
from genlm_backend.batching.ticker import Tickers
from genlm_backend.batching.waiter import (
    Entry,
    Settlement,
    Waiter,
    as_weight,
    call_threadsafe,
    deliver,
    drop_unwanted,
    evaluated,
    first_wanted,
    is_error,
    loops_of,
    presentable,
)
from genlm_backend.checks import function, instance, optional, text
from genlm_backend.errors import QueryDroppedError

Q = TypeVar("Q")
R = TypeVar("R")

_POLICY = instance(BatchPolicy, "a BatchPolicy")


@final
class Batcher(Calling, Generic[Q, R]):
    """Coalesces concurrent queries into batches and evaluates them on one worker thread.

    ``evaluate`` is an ordinary function from a list of distinct queries to as many results; it
    knows no futures and is never called twice at once. While it runs, the event loops are free
    and new queries gather; they go when it returns. Any number of event loops and threads may
    use one batcher. Equal keys share one result object: whoever hands results on as something
    to be modified copies them first.

    A caller that is cancelled disturbs nobody, and its query is not evaluated unless somebody
    else wants it. An ``evaluate`` that takes long calls ``check_wanted()`` between its steps, and
    ends where nobody is left. An exception out of ``evaluate`` reaches the callers of that batch
    and no one else; one that it returns in place of a result, the callers of that query.

    It belongs to the process that first asks it; a fork of that process gets a ``ForkedError``.

    Args:
        evaluate: Called on the worker thread with queries that weigh as much as the policy allows.
        policy: When a batch goes.
        key: Queries with equal keys are one query; what it raises refuses one. Default: the query.
        weight: What a query counts for in a batch, zero or more and 1 by default; what it raises
            refuses one. One too heavy for any goes alone.
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
    ) -> None:
        self._evaluate = function("evaluate", evaluate)
        self.policy = optional(_POLICY)("policy", policy) or BatchPolicy()
        self._key = optional(function)("key", key)
        self._weight = optional(function)("weight", weight)
        super().__init__(text("name", name))
        self._pending: dict[Hashable, Entry] = {}
        self._in_flight: dict[Hashable, Entry] = {}
        self._tickers = Tickers()
        self._is_busy = self._is_urgent = False
        self._num_arrived = 0
        self._counts = Counts()

    # ---------------------------------------------------------------- asking

    async def submit(self, query: Q) -> R:
        """Return the result for ``query``, evaluated together with whatever else is waiting.

        Raises:
            BatcherClosedError: After ``close()``, or when the interpreter has ended the worker.
            ForkedError: In a fork of the process that it belongs to.
            QueryDroppedError: If ``drop()`` or ``close()`` came first.
            Exception: What ``evaluate`` raised for this query's batch.
        """
        waiter = Waiter(asyncio.get_running_loop())
        try:
            self._ask(waiter, (query,))
            return cast(R, (await waiter.future)[0])
        except BaseException as error:
            self._leave(waiter, error)
            raise
        finally:
            del waiter  # whose future knows the error, which remembers this frame

    async def submit_all(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, in order, or the first error that one of them meets.

        What is still waiting of them then, and is nobody else's, is not evaluated. Raises what
        ``submit`` does.
        """
        waiter = Waiter(asyncio.get_running_loop())
        try:
            waits = self._ask(waiter, queries)
            return cast("list[R]", await waiter.future) if waits else []
        except BaseException as error:
            self._leave(waiter, error)
            raise
        finally:
            del waiter  # as above

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
        waiter = Waiter(None)
        try:
            waits = self._ask(waiter, queries)
            return cast("list[R]", waiter.future.result()) if waits else []
        except BaseException as error:
            waiter.future.cancel()
            self._leave(waiter, error)
            raise
        finally:
            del waiter  # as above

    def flush(self) -> None:
        """Let everything that waits go now, or as soon as the worker is free."""
        with self._lock.here:
            if self._pending:
                self._is_urgent = True
                self._advance(None)

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

        A batch that is being evaluated ends at its next ``check_wanted()``, and the results of
        one that does not ask are not delivered. Given an error in place of the reason, those who
        still wait for a batch get that, and no others.
        """
        error = reason if isinstance(reason, Exception) else QueryDroppedError(reason)
        with self._lock.here:
            settlements = self._refused(error, () if error is reason else self._in_flight.values())
        deliver(settlements)
        return len(settlements)

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
            self._counts.num_skipped += drop_unwanted(self._pending)
            return self._counts.statistics(len(self._pending), len(self._in_flight))

    # ---------------------------------------------------------------- coming and going

    def _ask(self, waiter: Waiter, queries: Iterable[Q]) -> bool:
        queries = tuple(queries)  # an iterable of its caller's may take long, or ask us
        with self._lock.here:
            if self._is_ending():
                self.check_open()
            for query in queries:
                key = cast(Hashable, query) if self._key is None else self._key(query)
                entry = self._pending.get(key) or self._in_flight.get(key)
                if entry is None:
                    weight = 1.0 if self._weight is None else as_weight(self._weight(query))
                    entry = self._pending[key] = Entry(key, query, weight)
                    self._num_arrived += 1
                else:
                    self._counts.num_joined += 1
                waiter.wait_for(entry)
                self._counts.num_submitted += 1
            if waiter.loop is None:
                # Nothing to hurry where all of them joined what is under evaluation.
                self._is_urgent = bool(self._pending)
                self._advance(None)
            elif any(entry.key in self._pending for entry in waiter.entries):
                self._advance(waiter.loop)
            return bool(waiter.entries)

    def _leave(self, waiter: Waiter, error: BaseException) -> None:
        """Take a caller off its queries, and off the queue those it was the last of."""
        if isinstance(error, GeneratorExit):
            waiter.is_gone = True  # the garbage collector's, maybe where its thread holds the lock
            return
        with self._lock.here:
            self._counts.num_skipped += waiter.leave(self._pending)
            self._is_urgent = self._is_urgent and bool(self._pending)

    def _advance(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Decide what becomes of the queue after a change that ``loop`` (or a thread) made."""
        state = BatchState(len(self._pending), self._is_busy, self._is_urgent)
        decision = self.policy.decide(state)
        if decision is Decision.FIRE:
            self._fire()
        elif decision is Decision.YIELD and loop is not None:
            ticker = self._tickers.of(loop)
            if not ticker.is_coming:
                ticker.start(self._num_arrived)
                loop.call_soon(self._tick, loop)
                ticker.is_scheduled = True

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """One pass of ``loop``, while queries of its own or of others wait."""
        try:
            self._pass(loop)
        except (KeyboardInterrupt, SystemExit):
            loop.call_soon(self._tick, loop)  # it may be run again
            raise

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock.here:
            ticker = self._tickers[loop]
            ticker.is_scheduled = False
            state = ticker.tick(
                self._num_arrived, len(self._pending), self._is_busy, self._is_urgent
            )
            decision = self.policy.decide(state)
            if decision is Decision.YIELD:
                loop.call_soon(self._tick, loop)
                ticker.is_scheduled = True
            elif decision is Decision.FIRE:
                self._fire()

    def _fire(self) -> None:
        """Have the worker take a batch.

        A thread may be interrupted anywhere in here: whoever comes next puts a job that is missing,
        and one too many finds nothing to do.
        """
        try:
            self.check_open()  # which claims the lock, for the thread is here
            self._worker.put(self._run)
        except RuntimeError as error:  # there is no thread any more, or none to be had
            deliver(self._refused(error))
        else:
            self._is_busy = True

    def _refused(self, error: BaseException, begun: Iterable[Entry] = ()) -> list[Settlement]:
        """Empty the queue; return whom to tell the error, those of a batch that has begun too."""
        entries = [*self._pending.values(), *begun]
        self._pending, self._is_urgent = {}, False
        return [s for entry in entries for s in entry.settlements(None, error)]

    def _take(self) -> list[Entry]:
        batch, gone = first_wanted(self._pending.values(), self.policy)
        self._in_flight.update((entry.key, entry) for entry in batch)
        for entry in (*batch, *gone):  # in this order, so that each is always in one of the two
            del self._pending[entry.key]
        self._is_urgent = self._is_urgent and bool(self._pending)
        self._counts.num_skipped += len(gone)
        self._counts.batch_sizes.update([len(batch)] if batch else [])
        return batch

    # ---------------------------------------------------------------- on the worker thread

    def _run(self) -> None:
        # All frames from here on may remember an error of ``evaluate``'s, by its traceback and what
        # called what: none of them knows it, or it would stay until garbage is collected.
        try:
            with self._lock.here:
                self._is_busy = True
                batch = self._take()
            self._is_wanted = lambda: any(entry.is_wanted() for entry in batch)
            with fewer_collections(len(batch)):
                self._settle(batch, *evaluated(self._evaluate, batch))
        except BaseException as raised:  # of a key that has changed, say: nobody waits for ever
            self._fail(presentable(raised))

    def _settle(self, batch: list[Entry], results: list[R], error: BaseException | None) -> None:
        settlements: list[Settlement] = []
        with self._lock.here:
            is_given_up = error is not None and error is self._given_up and not self._is_ending()
            self._is_wanted = self._given_up = None
            self._in_flight = {}
            for index, entry in enumerate(batch):
                if is_given_up:
                    if entry.waiters:  # they have come since
                        self._pending[entry.key] = entry
                        self._is_urgent = True
                    continue
                result, own = (results[index], None) if error is None else (None, error)
                if is_error(result):
                    result, own = None, presentable(result)
                self._counts.num_failed += own is not None
                settlements += entry.settlements(result, own)
            self._is_busy = False
            # A full or urgent batch goes from here; the rest once its loop has gone quiet, so
            # that the callers answered now can still join it.
            self._advance(None)
            wake = [] if self._is_busy else loops_of(self._pending.values())
        deliver(settlements)
        for loop in wake:
            call_threadsafe(loop, self._wake, loop)

    def _fail(self, error: BaseException) -> None:
        with self._lock.here:
            settlements = self._refused(error, self._in_flight.values())
            self._is_wanted = self._given_up = None
            self._in_flight, self._is_busy = {}, False
        deliver(settlements)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock.here:
            self._advance(loop)
