"""What every backend owes its callers beside others that are cancelled, fail or end."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genlm_backend.errors import BatcherClosedError, QueryDroppedError
from tests.llm.conftest import random_contexts
from tests.tree_integrity import check_integrity


async def test_cancelled_and_timed_out_callers_leave_others_intact(lm, backend, close):
    tasks = [asyncio.ensure_future(lm.next_token_logprobs([i, i])) for i in range(8)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[5].cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lm.next_token_logprobs([50, 51]), 0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for index, result in enumerate(results):
        if index in (0, 5):
            assert isinstance(result, asyncio.CancelledError)
        else:
            close(result, backend.expected([index, index]))
    close(await lm.next_token_logprobs([5, 5]), backend.expected([5, 5]))


async def test_an_exception_reaches_its_batch_and_the_next_call_works(lm, backend, close):
    def break_it(evaluator):
        evaluate = evaluator.evaluate

        def broken(queries):
            evaluator.evaluate = evaluate
            raise ZeroDivisionError("by the test")

        evaluator.evaluate = broken

    for evaluator in backend.evaluators(lm):
        break_it(evaluator)
    results = await asyncio.gather(
        *(lm.next_token_logprobs([i]) for i in range(4)), return_exceptions=True
    )
    assert [type(result) for result in results] == [ZeroDivisionError] * 4
    close(await lm.next_token_logprobs([2]), backend.expected([2]))
    for evaluator in backend.evaluators(lm):
        break_it(evaluator)
    with pytest.raises(ZeroDivisionError):
        lm.next_token_logprobs_sync([9])
    close(lm.next_token_logprobs_sync([9]), backend.expected([9]))


def test_rows_are_fresh_from_several_event_loops_and_threads(lm, backend, close):
    contexts = random_contexts(24, seed=5)
    expected = [backend.expected(context) for context in contexts]

    def by_loop(index):
        async def main():
            return await asyncio.gather(*map(lm.next_token_logprobs, contexts[index::4]))

        return asyncio.run(main()), expected[index::4]

    def by_thread(index):
        return list(map(lm.next_token_logprobs_sync, contexts[index::4])), expected[index::4]

    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            work = [pool.submit(way, i) for i in range(4) for way in (by_loop, by_thread)]
        for future in work:
            for row, want in zip(*future.result(), strict=True):
                close(row, want)
        lm.clear_cache()


async def test_reset_async_queries_settles_every_waiter(lm, backend, close):
    tasks = [asyncio.ensure_future(lm.next_token_logprobs([i])) for i in range(5)]
    await asyncio.sleep(0)
    lm.reset_async_queries()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [QueryDroppedError] * 5
    assert "reset_async_queries" in str(results[0])
    close(await lm.next_token_logprobs([2]), backend.expected([2]))


async def test_row_methods_after_close_raise_batcher_closed_error(backend):
    with backend.make() as lm:
        lm.next_token_logprobs_sync([1, 2])
    lm.close()  # again
    for ask in (lm.next_token_logprobs, lm.batch_next_token_logprobs):
        with pytest.raises(BatcherClosedError, match="closed"):
            await ask([[1, 2]] if "batch" in ask.__name__ else [1, 2])
    with pytest.raises(BatcherClosedError):
        lm.next_token_logprobs_sync([1, 2])
    lm.clear_cache()
    lm.reset_async_queries()
    lm.statistics()


async def test_closing_settles_waiters_and_ends_the_thread(backend):
    before = set(threading.enumerate())
    async with backend.make() as lm:
        tasks = [asyncio.ensure_future(lm.next_token_logprobs([i])) for i in range(3)]
        await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, (QueryDroppedError, torch.Tensor)) for result in results)
    assert not [t for t in set(threading.enumerate()) - before if "genlm" in t.name]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 2**30)),
        st.tuples(st.just("resample"), st.integers(0, 2**30)),
        st.tuples(st.just("cancel"), st.integers(0, 2**30)),
        st.tuples(st.just("clear"), st.booleans()),
        st.tuples(st.just("restart"), st.integers(0, 2**30)),
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.timeout(800)
@settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps)
def test_rows_are_fresh_after_any_history_of_particles(backend, close, steps):
    async def main(lm):
        particles = [[1, 2, 3, 4] for _ in range(6)]
        for action, number in steps:
            generator = random.Random(number)
            if action == "extend":
                particles = [[*p, generator.randrange(3)] for p in particles]
            elif action == "resample":
                particles = [list(generator.choice(particles)) for _ in particles]
            elif action == "restart":
                particles[generator.randrange(6)] = random_contexts(1, number)[0]
            elif action == "clear":
                lm.clear_cache()
            tasks = [asyncio.ensure_future(lm.next_token_logprobs(p)) for p in particles]
            if action == "cancel":
                await asyncio.sleep(0)
                tasks[generator.randrange(6)].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for particle, result in zip(particles, results, strict=True):
                if not isinstance(result, asyncio.CancelledError):
                    close(result, backend.expected(particle))
        statistics = lm.statistics()
        assert statistics.kv_bytes_used <= statistics.kv_bytes_budget
        assert statistics.row_bytes_used <= statistics.row_bytes_budget

    with backend.make(batch_size=4) as lm:
        asyncio.run(main(lm))
        if hasattr(lm._evaluator, "scheduler"):
            check_integrity(lm._evaluator.scheduler.tree)
