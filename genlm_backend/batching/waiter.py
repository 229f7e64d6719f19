"""Who waits for what: callers, their queries, and getting results back to their loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeGuard, final

from genlm_backend.batching.policy import BatchPolicy
from genlm_backend.checks import shown
from genlm_backend.errors import EvaluationError, OptionError


@final
class Waiter:
    """One caller, who waits for the results of one or more queries.

    Args:
        loop: Its event loop; ``None`` for a thread that blocks.

    Attributes:
        loop: As given.
        future: Future of the results, in the order of the queries; one of its event loop, or of
            its thread where it has none.
        entries: The queries.
        is_gone: Whether its coroutine was closed, maybe by the garbage collector.
    """

    __slots__ = ("_is_settled", "_num_missing", "entries", "future", "is_gone", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.loop = loop
        self.entries: list[Entry] = []
        self.is_gone = self._is_settled = False
        self.future: Any = concurrent.futures.Future() if loop is None else loop.create_future()
        self._num_missing = 0

    def wait_for(self, entry: Entry) -> None:
        """Wait for one query more, before any is answered."""
        self.entries.append(entry)
        self._num_missing += self not in entry.waiters
        entry.waiters[self] = None

    def told(self, error: BaseException | None) -> Settlement | None:
        """Note that one query has its result, or an error; return what the caller is to get.

        That is once: when the last result has come, or the first error.
        """
        self._num_missing -= 1
        if self._is_settled or (self._num_missing and error is None):
            return None
        self._is_settled = True
        if error is not None:
            return self, None, error
        entries, self.entries = self.entries, []
        return self, [entry.result for entry in entries], None

    def is_waiting(self) -> bool:
        """Whether anybody would still see a result."""
        if self.is_gone or self._is_settled or (self.loop is not None and self.loop.is_closed()):
            return False
        return not self.future.done()

    def leave(self, pending: dict[Hashable, Entry]) -> int:
        """Wait no more; take what nobody waits for now off a queue, and return how much that is."""
        num_left = len(pending)
        entries, self.entries = self.entries, []
        for entry in entries:
            entry.waiters.pop(self, None)
            if not entry.waiters and pending.get(entry.key) is entry:
                del pending[entry.key]
        return num_left - len(pending)


@final
class Entry:
    """One distinct query and everybody who waits for it.

    Args:
        key: What it is known by.
        query: The query.
        weight: What it counts for in a batch.

    Attributes:
        key: As given.
        query: As given.
        weight: As given.
        waiters: Who waits for it.
        result: What it was answered.
    """

    __slots__ = ("key", "query", "result", "waiters", "weight")

    def __init__(self, key: Hashable, query: object, weight: float) -> None:
        self.key = key
        self.query = query
        self.weight = weight
        self.result: object = None
        self.waiters: dict[Waiter, None] = {}  # a set in the order of their coming

    def is_wanted(self) -> bool:
        """Whether anybody would still see a result."""
        return any(waiter.is_waiting() for waiter in self.waiters)

    def settlements(self, result: object, error: BaseException | None) -> list[Settlement]:
        """Hand a result or an error to its waiters, who wait no more; return whom to tell."""
        # Or entry and waiters, pointing at each other, would keep the result until the garbage
        # collector comes by.
        waiters, self.waiters, self.result = self.waiters, {}, result
        told = [waiter.told(error) for waiter in waiters]
        return [settlement for settlement in told if settlement is not None]


def first_wanted(pending: Iterable[Entry], policy: BatchPolicy) -> tuple[list[Entry], list[Entry]]:
    """Return the oldest entries of a queue that somebody wants, and those before them.

    Args:
        pending: The queue.
        policy: Whose ``max_batch_size`` the entries weigh together at most, unless it is one that
            weighs more.

    Returns:
        The entries, and those on the way that nobody wants.
    """
    batch: list[Entry] = []
    gone: list[Entry] = []
    total = 0.0
    for entry in pending:
        if batch and total + entry.weight > policy.max_batch_size:
            break
        if entry.is_wanted():
            batch.append(entry)
            total += entry.weight
        else:
            gone.append(entry)
    return batch, gone


def drop_unwanted(pending: dict[Hashable, Entry]) -> int:
    """Take what nobody waits for any more off a queue; return how much that is."""
    gone = [key for key, entry in pending.items() if not entry.is_wanted()]
    for key in gone:
        del pending[key]
    return len(gone)


def as_weight(weight: Any) -> float:
    """Return what a query weighs as a number.

    Raises:
        OptionError: (``ValueError``) If it is none, not a number, or below zero.
    """
    try:
        number = float(weight)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"weight must return a number, got {shown(weight)}") from error
    if not number >= 0:
        raise OptionError(f"weight must return zero or more, got {number}")
    return number


def evaluated(
    evaluate: Callable[[list[Any]], Any], batch: list[Entry]
) -> tuple[list[Any], BaseException | None]:
    """Return the results of a batch, or the error that all of its queries meet.

    No frame that the error remembers knows the error, or it would stay until the garbage collector
    comes by.
    """
    if not batch:
        return [], None
    try:
        return _results(evaluate([entry.query for entry in batch]), len(batch)), None
    except BaseException as raised:  # everything must settle the futures, nothing else
        return [], presentable(raised)


def _results(found: Any, num_queries: int) -> list[Any]:
    is_array = hasattr(found, "__len__") and hasattr(found, "__getitem__")
    if not is_array or isinstance(found, Mapping):
        raise EvaluationError(f"evaluate returned {shown(found)}, and no sequence")
    results = list(found)
    if len(results) != num_queries:
        raise EvaluationError(f"evaluate returned {len(results)} results for {num_queries} queries")
    return results


Settlement = tuple[Waiter, list[object] | None, BaseException | None]
"""A caller, and the results or the exception it gets."""


def is_error(result: object) -> TypeGuard[Exception]:
    """Whether a result is an exception; asks its type alone, as an object may raise when asked."""
    return issubclass(type(result), Exception)


def presentable(raised: BaseException) -> BaseException:
    """An exception that may be set on a future: not one that futures or loops treat specially."""
    if is_error(raised) and not issubclass(type(raised), StopIteration):
        return raised
    try:
        said = repr(raised)
    except BaseException:  # of whatever type it is
        said = type(raised).__name__
    error = EvaluationError(f"the evaluation ended with {said}")
    error.__cause__ = raised
    return error


def loops_of(entries: Iterable[Entry]) -> list[asyncio.AbstractEventLoop]:
    """The event loops on which anybody waits."""
    loops = (waiter.loop for entry in entries for waiter in entry.waiters)
    return list({loop: None for loop in loops if loop is not None})


def deliver(settlements: list[Settlement]) -> None:
    """Settle each waiter where its future lives: one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Settlement]] = {}
    for settlement in settlements:
        by_loop.setdefault(settlement[0].loop, []).append(settlement)
    for loop, group in by_loop.items():
        if loop is None:
            for settlement in group:
                _settle(settlement)
        else:
            call_threadsafe(loop, _settle_all, group, loop)


def _settle_all(group: list[Settlement], loop: asyncio.AbstractEventLoop) -> None:
    """Settle waiters of an event loop; interrupted, have it go on with the others later."""
    num_settled = 0
    try:
        for settlement in group:
            _settle(settlement)
            num_settled += 1
    except BaseException:
        loop.call_soon(_settle_all, group[num_settled:], loop)
        raise


def _settle(settlement: Settlement) -> None:
    waiter, results, error = settlement
    future = waiter.future
    if future.done() or waiter.is_gone:
        return
    # A thread may give up waiting just now; an event loop's future lives on this thread.
    of_thread = isinstance(future, concurrent.futures.Future)
    if of_thread and not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(results)
    else:
        future.set_exception(error)


def call_threadsafe(loop: asyncio.AbstractEventLoop, callback: Callable, *args: object) -> None:
    """Have ``loop`` call back soon, unless it has been closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # A closed loop has nobody left to tell.
