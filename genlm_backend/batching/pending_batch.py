"""PendingBatch: queries and their callers, from the first query to the last answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, final

from genlm_backend.checks import shown
from genlm_backend.errors import EvaluationError, OptionError
from genlm_backend.runtime.background_loop import call_threadsafe

Loop: TypeAlias = asyncio.AbstractEventLoop | None
"""An event loop; ``None`` for threads that block."""


@final
class MultiWaiter:
    """The caller of many queries, who awaits all of their results at once."""

    __slots__ = ("_num_missing", "_numbers", "_results", "future", "is_settled", "loop")

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.future: Any = concurrent.futures.Future() if loop is None else loop.create_future()
        self.is_settled = False
        self._numbers: Sequence[int] = ()
        self._results: dict[int, Any] = {}
        self._num_missing = 0

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Wait for the queries of these numbers; called before any result."""
        self._numbers, self._num_missing = numbers, len(set(numbers))

    def told_all(self, first: int, results: Sequence[Any]) -> Any:
        """Note the results of a batch that is all of its own; return its future's result."""
        is_whole = not self.is_settled and self._num_missing == len(results)
        if not is_whole or self._results or has_errors(results):
            return _NOTHING
        self.is_settled = True
        if self._numbers == range(first, first + len(results)):
            return list(results)
        return [results[number - first] for number in self._numbers]

    def told(self, number: int, result: Any) -> Any:
        """Note a query's result or error; return its future's result, once, or ``_NOTHING``."""
        if self.is_settled:
            return _NOTHING
        self._num_missing -= 1
        if is_error(result):
            self.is_settled, self._results = True, {}
            return result
        self._results[number] = result
        if self._num_missing:
            return _NOTHING
        self.is_settled = True
        results, self._results = self._results, {}
        return [results[own] for own in self._numbers]


_NOTHING = object()

Caller: TypeAlias = "asyncio.Future[Any] | MultiWaiter"
"""One that waits for one query is its future."""


def leave(future: Any) -> None:
    """Stop waiting for a future: on any thread, at any moment, without a lock."""
    future.is_gone = True


def is_waiting(callers: Any) -> bool:
    """Whether a caller, or one of a dictionary of them, would still see a result."""
    if type(callers) is not MultiWaiter:
        if type(callers) is dict:
            return any(map(is_waiting, callers))
        if callers is None:
            return False
        future, loop = callers, callers.get_loop()
    elif callers.is_settled:
        return False
    else:
        future, loop = callers.future, callers.loop
    is_gone = getattr(future, "is_gone", False)
    return not (future.done() or is_gone or (loop is not None and loop.is_closed()))


@final
class PendingBatch:
    """Queries numbered in order, with their callers: first the queue, then a batch cut from it."""

    def __init__(self, first: int) -> None:
        self.first, self.num_abandoned = first, 0
        self.keys: list[Hashable] = []
        self.queries: list[Any] = []
        self.callers: list[Any] = []  # a caller, a dict of them for equal queries, or None
        self.weights: dict[int, float] = {}
        self.loops: set[Loop] = set()
        self.evaluated: Sequence[int] = ()

    def __len__(self) -> int:
        """Return the number of queries that have a caller, as far as is known."""
        return len(self.callers) - self.num_abandoned

    @property
    def stop(self) -> int:
        """Number of the query that comes next."""
        return self.first + len(self.callers)

    # ---------------------------------------------------------------- coming and going

    def add(self, key: Hashable, query: Any, weight: float, caller: Caller) -> int:
        # An interrupt may come between any two lines: a query is there once it has a caller, and
        # parts of one that has none give way to the next.
        index = len(self.callers)
        if not index == len(self.keys) == len(self.queries):
            del self.keys[index:], self.queries[index:]
        number = self.first + index
        if weight != 1.0 or self.weights:
            self.weights[number] = weight
        self.keys.append(key)
        self.queries.append(query)
        self.callers.append(caller)
        return number

    def add_all(self, keys: Sequence[Hashable], queries: Sequence[Any], caller: Caller) -> range:
        """Add many queries of one caller, each of weight 1; return their numbers."""
        index = len(self.callers)
        if not index == len(self.keys) == len(self.queries):
            del self.keys[index:], self.queries[index:]
        self.keys.extend(keys)
        self.queries.extend(queries)
        self.callers.extend([caller] * len(keys))
        return range(self.first + index, self.first + index + len(keys))

    def join(self, number: int, caller: Caller) -> None:
        """Wait for a query that is here already."""
        index = number - self.first
        present = self.callers[index]
        if present is None:
            self.callers[index] = caller
            self.num_abandoned -= 1
        elif type(present) is dict:
            present[caller] = None
        elif present is not caller:
            self.callers[index] = {present: None, caller: None}

    def leave(self, number: int, caller: Caller) -> bool:
        """Take a caller off a query; return whether it was the last one."""
        index = number - self.first
        present = self.callers[index]
        if type(present) is dict:
            present.pop(caller, None)
            is_last = not present
        else:
            is_last = present is caller
        if is_last:
            self.forget(number)
        return is_last

    def forget(self, number: int) -> Hashable:
        """Note that no caller waits for a query any more; return its key."""
        index = number - self.first
        self.num_abandoned += self.callers[index] is not None
        self.callers[index] = None
        return self.keys[index]

    def gone(self, stop: int | None = None) -> list[int]:
        """Return the numbers of queries whose last caller has stopped waiting."""
        own = self.callers[:stop]
        if self._are_futures(own) and not any(loop and loop.is_closed() for loop in self.loops):
            gone = [f.done() or getattr(f, "is_gone", False) for f in own]
        elif set(map(type, own)) == {MultiWaiter} and all(map(is_waiting, set(own))):
            return []
        else:
            gone = [c is not None and not is_waiting(c) for c in own]
        return [number for number, has_gone in enumerate(gone, self.first) if has_gone]

    @staticmethod
    def _are_futures(callers: list[Any]) -> bool:
        """Whether each is the one caller of its query, as a rule: then they are read at once."""
        return set(map(type, callers)) == {asyncio.Future}

    def is_wanted(self) -> bool:
        """Whether a caller would still see one of the results."""
        return any(map(is_waiting, self.callers))

    # ---------------------------------------------------------------- a batch

    @property
    def wanted_queries(self) -> list[Any]:
        if type(self.evaluated) is range:
            return self.queries[: len(self.evaluated)]
        return [self.queries[index] for index in self.evaluated]

    def size(self, max_weight: float, forward_key: Callable[[Any], Hashable] | None = None) -> int:
        """Return how many of the oldest queries make a batch."""
        is_plain = not self.weights and not self.num_abandoned
        if is_plain and (forward_key is None or len(self.callers) <= max_weight):
            return min(len(self.callers), int(max_weight))
        total, counted = 0.0, set[Hashable]()
        for index, callers in enumerate(self.callers):
            if callers is None:
                continue
            own = index if forward_key is None else forward_key(self.queries[index])
            if own in counted:
                continue
            weight = self.weights.get(self.first + index, 1.0)
            if counted and total + weight > max_weight:
                return index
            total += weight
            counted.add(own)
        return len(self.callers)

    def cut(self, size: int) -> PendingBatch:
        """Take off the oldest queries; those with callers are evaluated."""
        batch = PendingBatch(self.first)
        batch.loops = self.loops.copy()
        batch.keys, batch.queries = self.keys[:size], self.queries[:size]
        batch.callers = self.callers[:size]
        del self.keys[:size], self.queries[:size], self.callers[:size]
        self.first += size
        if self.weights:
            batch.weights = self.weights
            self.weights = {n: weight for n, weight in self.weights.items() if n >= self.first}
        batch.evaluated = range(size)
        if self.num_abandoned:
            batch.evaluated = [i for i, c in enumerate(batch.callers) if c is not None]
            batch.num_abandoned = size - len(batch.evaluated)
            self.num_abandoned = sum(callers is None for callers in self.callers)
        if not self.callers:
            self.loops = set()
        return batch

    def put_back(self, batch: PendingBatch) -> None:
        """Put a batch that was cut off back to where it was."""
        # What waited behind it may all have gone since: others have the numbers that come after.
        num_between = self.first - batch.stop
        for values, nothing in ((self.keys, _NOTHING), (self.queries, None), (self.callers, None)):
            values[:0] = [nothing] * num_between
        self.first, self.num_abandoned = (
            batch.first,
            self.num_abandoned + batch.num_abandoned + num_between,
        )
        self.weights = {**batch.weights, **self.weights}
        self.keys[:0], self.queries[:0], self.callers[:0] = batch.keys, batch.queries, batch.callers
        self.loops |= batch.loops

    # ---------------------------------------------------------------- answers

    def answered(self, results: Sequence[Any]) -> list[Answers]:
        """Take all callers off; return what each gets, by a result or error of each evaluated."""
        if len(self.loops) == 1 and self._are_futures(self.callers):
            (loop,) = self.loops
            return [(loop, self._taken(), results)]
        if set(map(type, self.callers)) == {MultiWaiter} and len(set(self.callers)) == 1:
            several: MultiWaiter = self.callers[0]
            given = several.told_all(self.first, results)
            if given is not _NOTHING:
                self._taken()
                return [(several.loop, [several.future], [given])]
        return self._told(self.evaluated, results)

    def refused(self, error: BaseException) -> list[Answers]:
        return self._told(range(len(self.callers)), [error] * len(self.callers))

    def _taken(self) -> list[Any]:
        callers, self.callers = self.callers, [None] * len(self.callers)
        self.num_abandoned = len(callers)
        return callers

    def _told(self, indices: Sequence[int], results: Sequence[Any]) -> list[Answers]:
        callers = self._taken()
        answers: dict[Loop, tuple[Loop, list[Any], list[Any]]] = {}
        for index, result in zip(indices, results, strict=True):
            of_one = callers[index]
            for caller in of_one if type(of_one) is dict else (of_one,):
                if type(caller) is MultiWaiter:
                    loop, future = caller.loop, caller.future
                    given = caller.told(self.first + index, result)
                elif caller is not None:
                    loop, future, given = caller.get_loop(), caller, result
                else:
                    continue
                if given is not _NOTHING:
                    _, futures, all_given = answers.setdefault(loop, (loop, [], []))
                    futures.append(future)
                    all_given.append(given)
        return list(answers.values())


Answers: TypeAlias = tuple[Loop, list[Any], Sequence[Any]]
"""An event loop, futures that live there, and the result or exception that each gets."""


def deliver(answers: list[Answers]) -> None:
    """Settle futures on their own loops: one wake-up for each event loop."""
    for loop, futures, given in answers:
        if loop is None:
            pairs = zip(futures, given, strict=True)
            # A thread may give up waiting just now.
            begin = concurrent.futures.Future[Any].set_running_or_notify_cancel
            _settle([pair for pair in pairs if not pair[0].done() and begin(pair[0])])
        else:
            call_threadsafe(loop, _settle_here, loop, futures, given)


def _settle_here(loop: asyncio.AbstractEventLoop, futures: list[Any], given: Sequence[Any]) -> None:
    """Settle futures of the loop that runs this; interrupted, have it go on later."""
    try:
        _settle(zip(futures, given, strict=True))
    except BaseException:
        loop.call_soon(_settle_here, loop, futures, given)  # but for those that are done
        raise


def _settle(pairs: Iterable[tuple[Any, Any]]) -> None:
    for future, given in pairs:
        if future.done() or getattr(future, "is_gone", False):
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


def is_error(result: object) -> TypeGuard[Exception]:
    """Whether a result is an exception, by its type alone: asking the object may raise."""
    return issubclass(type(result), Exception)


def has_errors(results: Sequence[Any]) -> bool:
    return any(issubclass(kind, Exception) for kind in set(map(type, results)))


def presentable(raised: BaseException) -> BaseException:
    """Return an exception that a future takes: none that futures or loops treat specially."""
    if is_error(raised) and not issubclass(type(raised), StopIteration):
        return raised
    try:
        said = repr(raised)
    except BaseException:  # of whatever type it is
        said = type(raised).__name__
    error = EvaluationError(f"the evaluation ended with {said}")
    error.__cause__ = raised
    return error
