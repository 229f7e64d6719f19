"""PendingQuery: a query, the callers that wait for its result, and how they get it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias, TypeGuard, final

from genlm_backend.checks import shown
from genlm_backend.errors import EvaluationError, OptionError
from genlm_backend.runtime.threads import call_threadsafe

Loop: TypeAlias = asyncio.AbstractEventLoop | None
"""An event loop; ``None`` for threads that block."""


@final
class MultiWaiter:
    """A caller that waits for the results of several queries at once, or blocks a thread."""

    is_settled = False  # its future has a result, or gets one soon
    num_missing = 0  # distinct queries without a result

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.future: Any = concurrent.futures.Future() if loop is None else loop.create_future()
        self.queries: list[PendingQuery] = []  # in the order in which it wants the results

    def note(self, is_error: bool) -> bool:
        """Note that one of its queries has a result; return whether its future gets one now."""
        self.num_missing -= 1
        if self.is_settled or (self.num_missing and not is_error):
            return False
        self.is_settled = True
        return True


Caller: TypeAlias = "asyncio.Future[Any] | MultiWaiter"
"""A caller of one query is its future, so that a row costs no other object."""


def leave(future: Any) -> None:
    """Stop waiting for a future: on any thread, at any moment, without a lock."""
    future.is_gone = True


def is_waiting(caller: Caller) -> bool:
    """Return whether a caller would still see a result."""
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
    """A distinct query: first in the queue, then in a batch that is evaluated."""

    __slots__ = ("callers", "key", "number", "query", "result", "weight")

    def __init__(self, key: Hashable, query: Any, weight: float, number: int, caller: Any) -> None:
        self.key, self.query, self.weight = key, query, weight
        self.number = number  # how many queries came before it
        self.callers: Any = caller  # one, a dictionary of several, or ``None``

    def is_wanted(self) -> bool:
        """Return whether a caller would still see its result."""
        if type(self.callers) is dict:
            return any(map(is_waiting, self.callers))
        return self.callers is not None and is_waiting(self.callers)

    def join(self, caller: Caller) -> bool:
        """Add a caller; return whether it was not there already."""
        callers = self.callers
        if callers is caller or (type(callers) is dict and caller in callers):
            return False  # it asks the query twice
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
    """Return the queries whose results no caller would see."""
    gone, last, is_last_waiting = list[PendingQuery](), None, False
    for query in queries:
        callers = query.callers
        if type(callers) is dict:
            is_wanted = query.is_wanted()
        else:
            if callers is not last:  # consecutive queries often have one caller, asked once
                last, is_last_waiting = callers, is_waiting(callers)
            is_wanted = is_last_waiting and callers is not None
        if not is_wanted:
            gone.append(query)
    return gone


def are_wanted(queries: Iterable[PendingQuery]) -> bool:
    """Return whether a caller would still see the result of one of them."""
    return any(query.is_wanted() for query in queries)


# -------------------------------------------------------------------- answers

Answers: TypeAlias = dict[Loop, list[tuple[Any, Any]]]
"""For each event loop its futures, each with its result or exception."""


def answers_of(results: Iterable[tuple[PendingQuery, Any]]) -> Answers:
    """Remove all callers of queries; return what each of them gets."""
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
    """Settle futures on their own loops: one wake-up for each event loop."""
    for loop, own in answers.items():
        if loop is None:
            # Another thread may cancel one at this moment.
            begin = concurrent.futures.Future[Any].set_running_or_notify_cancel
            _settle([pair for pair in own if not pair[0].done() and begin(pair[0])])
        else:
            call_threadsafe(loop, settle_here, loop, own)


def settle_here(loop: asyncio.AbstractEventLoop, answers: list[tuple[Any, Any]]) -> None:
    """Settle futures on the loop that runs this; after an interrupt, the loop does the rest."""
    try:
        _settle(answers)
    except BaseException:
        loop.call_soon(settle_here, loop, answers)  # those that are done are skipped
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
        raise OptionError(f"weight must return zero or more, got {number}")
    return number


# -------------------------------------------------------------------- what an evaluation came to


def evaluated(
    evaluate: Callable[[list[Any]], Any], queries: list[Any]
) -> tuple[list[Any], BaseException | None]:
    """Return the results of a batch, or the error that all of its queries meet."""
    if not queries:
        return [], None
    try:
        return _results(evaluate(queries), len(queries)), None
    except BaseException as raised:  # whatever it is, it goes to the callers
        return [], presentable(raised)


def _results(found: Any, num_queries: int) -> list[Any]:
    is_array = hasattr(found, "__len__") and hasattr(found, "__getitem__")
    if not is_array or isinstance(found, Mapping):
        raise EvaluationError(f"evaluate returned {shown(found)}, and no sequence")
    results = list(found)
    if len(results) != num_queries:
        raise EvaluationError(f"evaluate returned {len(results)} results for {num_queries} queries")
    return results


def is_error(result: object) -> TypeGuard[Exception]:
    """Whether a result is an exception, by its type alone: asking the object may raise."""
    return issubclass(type(result), Exception)


def presentable(raised: BaseException) -> BaseException:
    """Return an exception that futures and event loops do not treat specially."""
    if is_error(raised) and not issubclass(type(raised), StopIteration):
        return raised
    try:
        said = repr(raised)
    except BaseException:  # of whatever type it is
        said = type(raised).__name__
    error = EvaluationError(f"the evaluation ended with {said}")
    error.__cause__ = raised
    return error
