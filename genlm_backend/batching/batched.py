"""batched: makes an awaitable function of one query from a function of a list of queries."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast, final, overload

from genlm_backend.batching.batcher import Batcher
from genlm_backend.batching.policy import BatcherStatistics, BatchPolicy
from genlm_backend.checks import function as check_function
from genlm_backend.checks import shown
from genlm_backend.errors import OptionTypeError
from genlm_backend.runtime.closing import Closing

Q = TypeVar("Q")
R = TypeVar("R")

ListFunction = Callable[[list[Q]], "Sequence[R | Exception] | Awaitable[Sequence[R | Exception]]"]


@final
class Batched(Closing, Generic[Q, R]):
    """An awaitable function of one query, made by ``batched`` from a function of a list.

    If ``score`` is one, ``await score(query)`` waits for a result, ``await score.map(queries)`` for
    several, and ``score.map_sync(queries)`` blocks the thread. ``close()`` ends the worker thread.
    """

    def __init__(
        self,
        function: Callable[[list[Q]], Any],
        policy: BatchPolicy,
        key: Callable[[Q], Hashable] | None,
    ) -> None:
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._loop: asyncio.AbstractEventLoop | None = None  # made by the first batch, if async
        self.__wrapped__, self.__doc__ = function, inspect.getdoc(function)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        evaluate: Any = partial(self._evaluate) if is_async else function
        if is_async:
            evaluate.__name__ = self.__name__
        self._batcher = Batcher[Q, R](
            evaluate, policy, _hashable if key is None else key, name=self.__name__
        )

    def _evaluate(self, queries: list[Q]) -> Sequence[R | Exception]:
        """Run the coroutine function, on the worker thread, in one event loop for all batches."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(cast(Any, self.__wrapped__)(queries))

    async def __call__(self, query: Q) -> R:
        """Return the result for a query, computed in a batch with other callers' queries.

        Raises:
            RuntimeError: If the batched function itself awaits this, which would never end.
            Exception: Any error of ``Batcher.submit``.
        """
        self._check_loop()
        return await self._batcher.submit(query)

    async def map(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for queries, in order; see ``Batcher.submit_all``."""
        self._check_loop()
        return await self._batcher.submit_all(queries)

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is self._loop:
            raise RuntimeError(f"{self.__name__} cannot await its own results within a batch")

    def map_sync(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for queries, in order, blocking the calling thread."""
        return self._batcher.submit_sync(queries)

    def statistics(self) -> BatcherStatistics:
        """Return the batcher's counts and durations so far."""
        return self._batcher.statistics()

    def close(self) -> None:
        """Raise a ``QueryDroppedError`` in waiting callers, and end the worker; may be repeated."""
        self._batcher.close()
        if self._loop is not None and not self._batcher.is_foreign:
            self._loop.close()

    def __repr__(self) -> str:
        return f"<Batched {self.__name__}>"


def _hashable(query: Q) -> Q:
    """Return the query, its own key."""
    try:
        hash(query)
    except TypeError as error:
        raise OptionTypeError(
            f"the query {shown(query)} cannot be hashed ({error}): pass a tuple or a text, or give "
            "batched a function key= that returns one"
        ) from error
    return query


@overload
def batched(function: ListFunction[Q, R], /) -> Batched[Q, R]: ...


@overload
def batched(
    *,
    max_batch_size: int = 20,
    timeout: float = 0.02,
    key: Callable[[Any], Hashable] | None = None,
) -> Callable[[ListFunction[Q, R]], Batched[Q, R]]: ...


def batched(
    function: Any = None,
    /,
    *,
    max_batch_size: int = 20,
    timeout: float = 0.02,
    key: Callable[[Any], Hashable] | None = None,
) -> Any:
    """Make an awaitable function of one query from a function of a list of queries.

    For verifiers, reward models and other critics that every particle awaits: the queries of
    concurrent calls reach ``function`` in lists without duplicates. Its calls never overlap, and
    all run on one separate thread. Can be used as a decorator, with or without arguments.

    Args:
        function: A function or coroutine function that takes a list of queries and returns one
            result for each, or an exception in place of a result. A coroutine function runs in an
            event loop on that thread, the same loop for all batches.
        max_batch_size: Most queries in one call.
        timeout: Seconds that a query may wait for others; see ``BatchPolicy``.
        key: Returns a query's key; concurrent queries with equal keys share a result. By default,
            the key is the query, which has to be hashable.

    Raises:
        OptionTypeError: (``TypeError``) If an argument has a wrong type.
        OptionError: (``ValueError``) If a number is out of its bounds.
    """
    policy = BatchPolicy(max_batch_size=max_batch_size, timeout=timeout)

    def made(own: Any) -> Batched[Any, Any]:
        return Batched(check_function("function", own), policy, key)

    return made if function is None else made(function)
