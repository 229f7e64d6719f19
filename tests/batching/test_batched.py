"""batched: functions of a list, awaited one element at a time."""

import asyncio
import threading

import pytest

from genlm_backend import batched
from genlm_backend.errors import (
    BatcherClosedError,
    EvaluationError,
    OptionError,
    OptionTypeError,
)


@pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
def test_concurrent_awaits_share_calls_of_distinct_queries(is_async):
    calls, loops = [], set()

    if is_async:

        @batched(max_batch_size=8)
        async def double(queries):
            """Double numbers."""
            await asyncio.sleep(0)
            loops.add(asyncio.get_running_loop())
            calls.append(queries)
            return [2 * query for query in queries]
    else:

        @batched(max_batch_size=8)
        def double(queries):
            """Double numbers."""
            calls.append(queries)
            return [2 * query for query in queries]

    async def main():
        found = await asyncio.gather(*(double(i % 12) for i in range(24)))
        assert found == [2 * (i % 12) for i in range(24)]
        assert await double.map([5, 3, 5]) == [10, 6, 10]

    with double:
        asyncio.run(main())
        asyncio.run(main())  # in another loop
        assert double.map_sync([1, 2]) == [2, 4]
        assert [len(queries) for queries in calls] == [8, 4, 2] * 2 + [2]
        assert len(loops) == is_async
        assert double.statistics().num_batches == 7
        assert (double.__name__, double.__doc__) == ("double", "Double numbers.")
    with pytest.raises(BatcherClosedError):
        double.map_sync([1])


@pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
def test_returned_exception_fails_one_caller_and_raised_one_fails_all(is_async):
    def plain(queries):
        if "raise" in queries:
            raise ArithmeticError("all")
        return [ValueError(query) if query == "bad" else query for query in queries]

    async def coroutine(queries):
        return plain(queries)

    async def main(score):
        found = await asyncio.gather(score("a"), score("bad"), score("b"), return_exceptions=True)
        assert found[0::2] == ["a", "b"]
        assert isinstance(found[1], ValueError)
        found = await asyncio.gather(score("a"), score("raise"), return_exceptions=True)
        assert all(isinstance(each, ArithmeticError) for each in found)
        assert await score("a") == "a"

    with batched(coroutine if is_async else plain) as score:
        asyncio.run(main(score))


def test_cancelled_caller_leaves_the_others_and_the_next_batch_intact():
    begun, go_on = threading.Event(), threading.Event()

    @batched(key=str)
    async def score(queries):
        begun.set()
        await asyncio.to_thread(go_on.wait)
        return [query[0] for query in queries]

    async def main():
        first, second = (asyncio.ensure_future(score([i])) for i in range(2))
        await asyncio.to_thread(begun.wait)
        first.cancel()
        go_on.set()
        assert await second == 1
        assert first.cancelled()
        assert await score([0]) == 0

    with score:
        asyncio.run(main())


def test_mistakes_name_the_argument():
    with pytest.raises(OptionTypeError, match="function"):
        batched(3)
    with pytest.raises(OptionError, match="max_batch_size"):
        batched(max_batch_size=0)


@pytest.mark.parametrize("is_async", [False, True])
def test_lists_and_wrong_numbers_of_results_are_errors_that_name_the_way_out(is_async):
    def reward(queries):
        return queries[1:]

    async def reward_later(queries):
        return queries[1:]

    with batched(reward_later if is_async else reward) as score:
        with pytest.raises(TypeError, match=r"\[1, 2\] cannot be hashed .*pass a tuple .*key="):
            asyncio.run(score([1, 2]))
        with pytest.raises(EvaluationError, match=f"^{score.__name__} returned 1 results for 2"):
            score.map_sync([(1,), (2,)])
    with batched(list, key=tuple) as score:
        assert score.map_sync([[1, 2], [3]]) == [[1, 2], [3]]


def test_coroutine_function_that_awaits_its_own_results_raises():
    @batched
    async def score(queries):
        return [await score(query - 1) for query in queries]

    with score, pytest.raises(RuntimeError, match="score cannot await its own results"):
        asyncio.run(score(3))
