"""PendingQuery: a query and the callers that wait for its result; delivery of results."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias, TypeGuard, final

from genlm_backend.checks import shown
from genlm_backend.errors import EvaluationError, OptionError
from genlm_backend.runtime.threads import call_threadsafe

Loop: TypeAlias = asyncio.AbstractEventLoop | None
"""A caller's event loop; ``None`` if the caller blocks a thread."""


@final
class MultiWaiter:
    """A caller that waits for several queries at once, or blocks a thread."""

    is_settled = False  # its future has a result or is about to get one
    num_missing = 0  # distinct queries without a result

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.future: Any = concurrent.futures.Future() if loop is None else loop.create_future()
        self.queries: list[PendingQuery] = []  # in the order of the results

    def note(self, is_error: bool) -> bool:
        """Count a query as answered; return whether its answer settles the future."""
        self.num_missing -= 1
        if self.is_settled or (self.num_missing and not is_error):
            return False
        self.is_settled = True
        return True


Caller: TypeAlias = "asyncio.Future[Any] | MultiWaiter"
"""For a caller of one query, just its future, which saves an object; else a ``MultiWaiter``."""


def leave(future: Any) -> None:
    """Mark a future as abandoned; takes no lock, so any thread may call it at any moment."""
    future.is_gone = True


def is_waiting(caller: Caller) -> bool:
    """Return whether a caller still waits: not answered, not gone, and its event loop is open."""
    if type(caller) is MultiWaiter:
        if caller.is_settled:
            return False
        future, loop = caller.future, caller.loop
    else:
        future, loop = caller, caller.get_loop()
    is_over = getattr(future, "is_gone", False) or future.done()
    return not (is_over or (loop is not None and loop.is_closed()))


@final
class PendingQuery:
    """A distinct query, in the queue or in the batch under evaluation."""

    __slots__ = ("arrived", "callers", "key", "number", "query", "result", "weight")

    def __init__(
        self, key: Hashable, query: Any, weight: float, number: int, caller: Any, arrived: float
    ) -> None:
        self.key, self.query, self.weight = key, query, weight
        self.arrived = arrived  # by time.monotonic
        self.number = number  # number of distinct queries that arrived before it
        self.callers: Any = caller  # one caller, a dictionary of several, or ``None``

    def is_wanted(self) -> bool:
        """Return whether any of its callers still waits."""
        if type(self.callers) is dict:
            return any(map(is_waiting, self.callers))
        return self.callers is not None and is_waiting(self.callers)

    def join(self, caller: Caller) -> bool:
        """Add a caller; return whether it is new."""
        callers = self.callers
        if callers is caller or (type(callers) is dict and caller in callers):
            return False  # one caller has the same query twice
        if type(callers) is dict:
            callers[caller] = None
        else:
            self.callers = caller if callers is None else dict.fromkeys([callers, caller])
        return True

    def leave(self, caller: Caller) -> bool:
        """Remove a caller; return whether none is left."""
        if type(self.callers) is dict:
            self.callers.pop(caller, None)
        elif self.callers is caller:
            self.callers = None
        return not self.callers


def unwanted(queries: Iterable[PendingQuery]) -> list[PendingQuery]:
    """Return the queries for which no caller waits any more."""
    gone, last, is_last_waiting = list[PendingQuery](), None, False
    for query in queries:
        callers = query.callers
        if type(callers) is dict:
            is_wanted = query.is_wanted()
        else:
            if callers is not last:  # consecutive queries often share one caller: check it once
                last, is_last_waiting = callers, is_waiting(callers)
            is_wanted = is_last_waiting and callers is not None
        if not is_wanted:
            gone.append(query)
    return gone


def are_wanted(queries: Iterable[PendingQuery]) -> bool:
    """Return whether a caller still waits for any of the queries."""
    return any(query.is_wanted() for query in queries)


# -------------------------------------------------------------------- answers

Answers: TypeAlias = dict[Loop, list[tuple[Any, Any]]]
"""Pairs of a future and its result or exception, by event loop."""


def answers_of(results: Iterable[tuple[PendingQuery, Any]]) -> Answers:
    """Detach all callers from the queries; return the answers with which to settle futures now."""
    answers: Answers = {}
    for query, result in results:
        failed = is_error(result)
        callers, query.callers = query.callers, None
        query.result = None if failed else result
        for caller in callers if type(callers) is dict else (callers,):
            if type(caller) is MultiWaiter:
                if not caller.note(failed):
                    continue
                loop, future = caller.loop, caller.future
                given = result if failed else [query.result for query in caller.queries]
            elif caller is None:
                continue
            else:
                loop, future, given = caller.get_loop(), caller, result
            if loop not in answers:
                answers[loop] = []
            answers[loop].append((future, given))
    return answers


def deliver(answers: Answers) -> None:
    """Settle futures: by one callback on each event loop, and at once for blocked threads."""
    for loop, own in answers.items():
        if loop is None:
            # Claim each future before it is settled, since another thread may cancel it.
            begin = concurrent.futures.Future[Any].set_running_or_notify_cancel
            _settle([pair for pair in own if not pair[0].done() and begin(pair[0])])
        else:
            call_threadsafe(loop, settle_here, loop, own)


def settle_here(loop: asyncio.AbstractEventLoop, answers: list[tuple[Any, Any]]) -> None:
    """Settle futures on the running loop; after an interrupt, schedule this call again."""
    try:
        _settle(answers)
    except BaseException:
        loop.call_soon(settle_here, loop, answers)  # it skips futures that are done
        raise


def _settle(answers: list[tuple[Any, Any]]) -> None:
    for future, given in answers:
        if getattr(future, "is_gone", False) or future.done():
            continue
        if not issubclass(type(given), Exception):
            future.set_result(given)
        else:
            future.set_exception(presentable(given))


def as_weight(weight: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"weight must return a number, got {shown(weight)}") from error
    if not number >= 0:
        raise OptionError(f"weight must return a number of 0 or more, got {number}")
    return number


# -------------------------------------------------------------------- results of an evaluation


def evaluated(
    evaluate: Callable[[list[Any]], Any], queries: list[Any]
) -> tuple[list[Any], BaseException | None]:
    """Evaluate a batch; return its results, or the error that all of its queries get."""
    if not queries:
        return [], None
    try:
        name = getattr(evaluate, "__name__", "evaluate")
        return _results(evaluate(queries), len(queries), name), None
    except BaseException as raised:  # SystemExit too goes to the callers
        return [], presentable(raised)


def _results(found: Any, num_queries: int, name: str) -> list[Any]:
    is_array = hasattr(found, "__len__") and hasattr(found, "__getitem__")
    if not is_array or isinstance(found, Mapping):
        raise EvaluationError(f"{name} must return a sequence, got {shown(found)}")
    results = list(found)
    if len(results) != num_queries:
        raise EvaluationError(f"{name} returned {len(results)} results for {num_queries} queries")
    return results


def is_error(result: object) -> TypeGuard[Exception]:
    """Whether a result is an exception, by its type: ``isinstance`` may run the object's code."""
    return issubclass(type(result), Exception)


def presentable(raised: BaseException) -> BaseException:
    """Return the exception, wrapped if futures or loops treat it specially (StopIteration, …)."""
    if is_error(raised) and not issubclass(type(raised), StopIteration):
        return raised
    try:
        said = repr(raised)
    except BaseException:  # a user's __repr__ may raise anything
        said = type(raised).__name__
    error = EvaluationError(f"the evaluation raised {said}")
    error.__cause__ = raised
    return error
