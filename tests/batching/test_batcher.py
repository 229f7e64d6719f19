"""The Batcher's contract, a clause a test."""

import asyncio
import functools
import gc
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.batching import Batcher, BatcherStatistics, BatchPolicy
from genlm_backend.errors import BatcherClosedError, EvaluationError, QueryDroppedError
from tests.naive import naive_batch

PATIENT = BatchPolicy(max_batch_size=100, timeout=1000.0, quiet_turns=4, max_turns=1_000_000)


async def passes(count):
    for _ in range(count):
        await asyncio.sleep(0)


def test_new_batcher_has_empty_statistics(recorder):
    batcher = Batcher(recorder)
    assert batcher.statistics() == BatcherStatistics()
    batcher.close()


async def test_concurrent_queries_become_one_batch(recorder):
    batcher = Batcher(recorder, PATIENT)
    results = await asyncio.gather(*(batcher.submit(i) for i in range(10)))
    assert results == [2 * i for i in range(10)]
    assert recorder.batches == [list(range(10))]
    batcher.close()


async def test_a_full_batch_fires_at_once_and_the_rest_follows(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=4, timeout=1000.0))
    results = await asyncio.gather(*(batcher.submit(i) for i in range(10)))
    assert results == [2 * i for i in range(10)]
    assert recorder.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    batcher.close()


async def test_a_quiet_loop_fires_long_before_the_timeout(recorder):
    batcher = Batcher(recorder, PATIENT)
    start = time.monotonic()
    assert await asyncio.wait_for(batcher.submit(3), 60) == 6
    assert time.monotonic() - start < 30  # the timeout is a thousand seconds
    batcher.close()


async def test_queries_a_few_passes_apart_still_share_a_batch(recorder):
    batcher = Batcher(recorder, PATIENT)

    async def late(value, count):
        await passes(count)
        return await batcher.submit(value)

    assert await asyncio.gather(*(late(i, 2 * i) for i in range(4))) == [0, 2, 4, 6]
    assert recorder.batches == [[0, 1, 2, 3]]
    batcher.close()


async def test_idle_time_before_first_query_does_not_count_to_timeout(recorder):
    policy = BatchPolicy(max_batch_size=100, timeout=0.5, quiet_turns=4, max_turns=50)
    batcher = Batcher(recorder, policy)
    assert await batcher.submit(5) == 10
    await asyncio.sleep(0.6)

    async def late(value):
        for _ in range(2 * value):
            time.sleep(0.01)  # noqa: ASYNC251 -- the worker could take whatever had gone
            await passes(1)
        return await batcher.submit(value)

    assert await asyncio.gather(*map(late, range(4))) == [0, 2, 4, 6]
    assert recorder.batches == [[5], [0, 1, 2, 3]]
    batcher.close()


async def test_a_trickle_cannot_starve_the_first_query(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=10_000, timeout=1000.0, max_turns=50))
    others, arrived, put = [], [], batcher._worker.put
    batcher._worker.put = lambda job: (arrived.append(len(others)), put(job))
    first = asyncio.ensure_future(batcher.submit(-1))
    while not first.done():
        others.append(asyncio.ensure_future(batcher.submit(len(others))))
        assert len(others) < 100_000
        await passes(1)
    await asyncio.gather(*others)
    assert first.result() == -2
    assert arrived[0] <= 60  # when the worker was told to begin
    batcher.close()


async def test_the_timeout_counts_from_the_first_query(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=10**9, timeout=0.05, max_turns=10**9))
    first = asyncio.ensure_future(batcher.submit(-1))
    start, others = time.monotonic(), []
    while not recorder.batches:
        assert time.monotonic() - start < 30
        others.append(asyncio.ensure_future(batcher.submit(len(others))))
        await passes(1)
    await asyncio.gather(first, *others)
    batcher.close()


async def test_queries_during_evaluation_form_the_next_batch(recorder):
    batcher = Batcher(recorder, PATIENT)
    recorder.hold()
    first = asyncio.ensure_future(batcher.submit(0))
    while not recorder.is_held.is_set():
        await passes(1)
    others = [asyncio.ensure_future(batcher.submit(i)) for i in range(1, 6)]
    await passes(100)
    assert len(recorder.batches) == 1
    recorder.let_go()
    assert await asyncio.gather(first, *others) == [0, 2, 4, 6, 8, 10]
    assert recorder.batches == [[0], [1, 2, 3, 4, 5]]
    batcher.close()


def test_coroutine_function_as_evaluate_raises_type_error():
    async def score(queries):
        return queries

    class Scorer:
        async def __call__(self, queries):
            return queries

    for wrong, name in (
        (score, "score"),
        (functools.partial(score), "partial"),
        (Scorer(), "Scorer"),
    ):
        with pytest.raises(TypeError, match=f"ordinary function, .*: write {name} without async"):
            Batcher(wrong)


async def test_the_loop_is_free_while_a_batch_is_evaluated(recorder):
    batcher = Batcher(recorder, PATIENT)
    recorder.hold()
    task = asyncio.ensure_future(batcher.submit(1))
    while not recorder.is_held.is_set():
        await passes(1)
    await passes(10_000)
    assert not task.done()
    recorder.let_go()
    assert await task == 2
    batcher.close()


def test_histograms_count_each_batch_and_the_longest_wait_in_it():
    policy = BatchPolicy(max_batch_size=3)
    batcher = Batcher(lambda queries: [time.sleep(0.03) or query for query in queries], policy)
    start = time.monotonic()
    batcher.submit_sync((1, 2, 2, 3, 4))  # the batch of 4 waits for the one of 1, 2 and 3
    seconds, statistics = time.monotonic() - start, batcher.statistics()
    waits, batches = statistics.queue_time_seconds, statistics.batch_time_seconds
    assert (waits.count, batches.count) == (2, 2)
    assert 0.12 <= batches.sum <= seconds
    assert 0.09 <= waits.sum <= seconds
    counts = list(batches.buckets.values())
    assert counts == sorted(counts)
    assert list(batches.buckets)[-1] == "+Inf"
    assert [float(bound) for bound in batches.buckets] == sorted(map(float, batches.buckets))
    assert batches.buckets["0.025"] == 0
    both = BatcherStatistics.sum([statistics, BatcherStatistics(), statistics])
    assert both.batch_time_seconds.as_dict()["count"] == 4
    assert both.batch_time_seconds.buckets == {k: 2 * v for k, v in batches.buckets.items()}
    assert both.batch_sizes == {size: 2 * times for size, times in statistics.batch_sizes.items()}
    batcher.close()


async def test_equal_keys_share_one_evaluation_even_in_flight(recorder):
    batcher = Batcher(recorder, PATIENT, key=lambda query: query % 10)
    recorder.hold()
    early = [asyncio.ensure_future(batcher.submit(value)) for value in (3, 13, 4)]
    while not recorder.is_held.is_set():
        await passes(1)
    late = asyncio.ensure_future(batcher.submit(23))
    await passes(1)
    recorder.let_go()
    assert await asyncio.gather(*early, late) == [6, 6, 8, 6]
    assert recorder.batches == [[3, 4]]
    statistics = batcher.statistics()
    assert (statistics.num_submitted, statistics.num_joined) == (4, 2)
    assert dict(statistics.batch_sizes) == {2: 1}
    batcher.close()


async def test_failing_evaluation_fails_its_own_batch_only(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=2, timeout=1000.0))
    error = ValueError("broken")

    def evaluate(queries):
        if 2 in queries:
            raise error
        return recorder(queries)

    batcher._evaluate = evaluate
    results = await asyncio.gather(*(batcher.submit(i) for i in range(6)), return_exceptions=True)
    assert results == [0, 2, error, error, 8, 10]
    assert await batcher.submit(2 + 5) == 14
    assert batcher.statistics().num_failed == 2
    batcher.close()


@pytest.mark.parametrize("raised", [StopIteration("x"), KeyboardInterrupt(), SystemExit(3)])
async def test_exceptions_that_futures_cannot_carry_are_wrapped(recorder, raised):
    batcher = Batcher(recorder, PATIENT)
    recorder.error = raised
    with pytest.raises(EvaluationError) as caught:
        await batcher.submit(1)
    assert caught.value.__cause__ is raised
    recorder.error = None
    assert await batcher.submit(1) == 2
    batcher.close()


async def test_exception_in_results_is_raised_for_its_own_query_only():
    error = ValueError("three")
    batcher = Batcher(lambda queries: [error if q == 3 else q for q in queries])
    asked = (batcher.submit(query) for query in (1, 3, 3, 5))
    assert await asyncio.gather(*asked, return_exceptions=True) == [1, error, error, 5]
    assert batcher.statistics().num_batches == batcher.statistics().num_failed == 1
    batcher.close()


async def test_too_few_results_raise_evaluation_error():
    batcher = Batcher(lambda queries: queries[1:], PATIENT)
    with pytest.raises(EvaluationError, match="0 results for 1 queries"):
        await batcher.submit(1)
    batcher.close()


async def test_drop_settles_every_waiter_pending_or_in_flight(recorder):
    batcher = Batcher(recorder, PATIENT)
    recorder.hold()
    first = asyncio.ensure_future(batcher.submit(1))
    while not recorder.is_held.is_set():
        await passes(1)
    second = asyncio.ensure_future(batcher.submit(2))
    await passes(1)
    assert batcher.drop("by the test") == 2
    results = await asyncio.gather(first, second, return_exceptions=True)
    recorder.let_go()
    after = await batcher.submit(3)
    assert [type(result) for result in results] == [QueryDroppedError] * 2
    assert "by the test" in str(results[0])
    assert after == 6
    assert recorder.batches == [[1], [3]]
    batcher.close()


async def test_flush_sends_a_batch_without_waiting(recorder):
    batcher = Batcher(
        recorder, BatchPolicy(100, timeout=1000.0, quiet_turns=10**9, max_turns=10**9)
    )
    task = asyncio.ensure_future(batcher.submit(1))
    await passes(5)
    assert not recorder.batches
    batcher.flush()
    assert await asyncio.wait_for(task, 60) == 2
    batcher.close()


@pytest.mark.parametrize("others", [0, 1])
async def test_flush_does_not_hurry_later_queries_after_a_cancellation(recorder, others):
    batcher = Batcher(
        recorder, BatchPolicy(100, timeout=1000.0, quiet_turns=10**9, max_turns=10**9)
    )
    recorder.hold()
    first = asyncio.ensure_future(batcher.submit(0))
    await passes(2)
    batcher.flush()
    while not recorder.is_held.is_set():
        await passes(1)
    left = asyncio.ensure_future(batcher.submit(1))
    patient = [asyncio.ensure_future(batcher.submit(2)) for _ in range(others)]
    await passes(2)
    if not others:
        batcher.flush()  # of the one that leaves
    left.cancel()
    await passes(2)
    recorder.let_go()
    assert await first == 0
    patient = patient or [asyncio.ensure_future(batcher.submit(2))]
    await passes(200)
    assert recorder.batches == [[0]]
    batcher.flush()
    assert await asyncio.gather(*patient) == [4]
    batcher.close()


async def test_close_settles_waiters_waits_for_the_batch_and_refuses_more(recorder):
    batcher = Batcher(recorder, PATIENT)
    recorder.hold()
    first = asyncio.ensure_future(batcher.submit(1))
    while not recorder.is_held.is_set():
        await passes(1)
    second = asyncio.ensure_future(batcher.submit(2))
    await passes(1)
    closing = asyncio.ensure_future(asyncio.to_thread(batcher.close))
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert not closing.done()  # the batch is still being evaluated
    recorder.let_go()
    await closing
    assert [type(result) for result in results] == [QueryDroppedError] * 2
    batcher.close()
    with pytest.raises(BatcherClosedError):
        await batcher.submit(3)
    with pytest.raises(BatcherClosedError):
        batcher.submit_sync([3])
    with pytest.raises(BatcherClosedError):
        batcher.call(lambda: None)
    assert recorder.batches == [[1]]


def test_closed_error_names_the_batcher():
    batcher = Batcher(list, name="the librarian")
    batcher.close()
    with pytest.raises(BatcherClosedError, match="the librarian has been closed"):
        batcher.submit_sync([3])


def test_batcher_keeps_no_reference_to_a_returned_result(recorder):
    class Thing:
        pass

    batcher = Batcher(lambda queries: [Thing() for _ in queries], PATIENT)

    async def main():
        thing = await batcher.submit(Thing())
        return weakref.ref(thing)

    gc.disable()  # nothing waits for the garbage collector
    try:
        kept = asyncio.run(main())
        batcher.call(lambda: None)  # the worker is past the batch
        assert kept() is None
    finally:
        gc.enable()
    batcher.close()


def test_garbage_collected_batcher_ends_its_thread():
    def names():
        return [thread.name for thread in threading.enumerate()]

    batcher = Batcher(lambda queries: queries, PATIENT, name="short-lived")
    asyncio.run(batcher.submit(1))
    assert "genlm-short-lived" in names()
    del batcher
    gc.collect()
    deadline = time.monotonic() + 30
    while "genlm-short-lived" in names():
        assert time.monotonic() < deadline


async def test_call_runs_on_worker_thread_and_raises_its_exception(recorder):
    batcher = Batcher(recorder, PATIENT, name="the-worker")
    assert batcher.call(lambda: threading.current_thread().name) == "genlm-the-worker"
    with pytest.raises(ZeroDivisionError):
        batcher.call(lambda: 1 // 0)
    assert await batcher.submit(2) == 4
    batcher.close()


class Held:
    """A worker thread that is at a call of the test's, with a batch in its queue."""

    def __init__(self, batcher):
        self.gate, is_held = threading.Event(), threading.Event()
        self.calls = [batcher.call_soon(lambda: (is_held.set(), self.gate.wait(30)))]
        assert is_held.wait(30)


async def ask(batcher, query):
    """Return a task whose query waits."""
    task = asyncio.ensure_future(batcher.submit(query))
    await passes(1)
    return task


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_queries_submitted_after_a_call_are_evaluated_after_it(recorder, is_cancelled):
    batcher = Batcher(recorder, PATIENT)
    held, seen = Held(batcher), []
    tasks = [await ask(batcher, 1)]
    batcher.flush()
    calls = [batcher.call_soon(lambda: seen.append(list(recorder.batches)))]
    tasks += [await ask(batcher, 2), await ask(batcher, 1)]
    calls.append(batcher.call_soon(lambda: seen.append(list(recorder.batches))))
    tasks.append(await ask(batcher, 3))
    if is_cancelled:
        tasks[0].cancel()
        tasks[2].cancel()
        await passes(2)
    held.gate.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert results[1::2] == [4, 6]
    before = [] if is_cancelled else [[1]]
    assert seen == [before, before]
    assert recorder.batches == [*before, [2, 3]]
    batcher.close()


async def test_cancelled_call_does_not_block_later_queries(recorder):
    batcher = Batcher(recorder, PATIENT)
    held = Held(batcher)
    tasks = [await ask(batcher, 1)]
    batcher.flush()
    call = batcher.call_soon(lambda: recorder.batches.append("called"))
    tasks.append(await ask(batcher, 2))
    assert call.cancel()
    held.gate.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 30) == [2, 4]
    assert await asyncio.gather(*map(batcher.submit, range(5, 9))) == [10, 12, 14, 16]
    assert [query for batch in recorder.batches for query in batch] == [1, 2, 5, 6, 7, 8]
    batcher.close()


class Plan:
    """What one coroutine of the property test does."""

    wait = st.integers(0, 12)
    value = st.integers(0, 6)
    asked = st.one_of(value, st.lists(value, max_size=5))
    fate = st.sampled_from(["await", "await", "await", "cancel", "timeout"])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(Plan.wait, Plan.asked, Plan.fate, Plan.wait), min_size=1, max_size=30),
    st.integers(1, 7),
    st.sets(st.integers(0, 6), max_size=2),
    st.sets(st.integers(0, 6), max_size=1),
)
def test_every_caller_gets_its_own_answer_under_random_failures(plans, batch_size, broken, refused):
    evaluated = []

    def answers(queries):
        return [ArithmeticError(f"[{q}]") if q in refused else 2 * q for q in queries]

    def evaluate(queries):
        evaluated.append(list(queries))
        if broken & set(queries):
            raise ArithmeticError(repr(queries))
        return answers(queries)

    batcher = Batcher(evaluate, BatchPolicy(batch_size, timeout=0.01))

    async def caller(wait, asked, fate, patience):
        await passes(wait)
        submit = batcher.submit_all if isinstance(asked, list) else batcher.submit
        task = asyncio.ensure_future(submit(asked))
        if fate != "await":
            await passes(patience)
            task.cancel()
        try:
            return await task
        except (asyncio.CancelledError, ArithmeticError) as error:
            return error

    async def main():
        return await asyncio.gather(*(caller(*plan) for plan in plans))

    results = asyncio.run(main())
    for (_, asked, fate, _), result in zip(plans, results, strict=True):
        values = asked if isinstance(asked, list) else [asked]
        if isinstance(result, asyncio.CancelledError):
            assert fate != "await"
        elif isinstance(result, ArithmeticError):
            batch = eval(str(result))
            assert set(values) & set(batch)
            assert (broken | refused) & set(batch)
        else:
            assert (result if values is asked else [result]) == naive_batch(answers, values)
            assert not set(values) & (broken | refused)
    for batch in evaluated:
        assert len(batch) <= batch_size
        assert len(set(batch)) == len(batch)
    batcher.call(lambda: None)  # a batch whose callers have gone may still be under way
    statistics = batcher.statistics()
    assert (statistics.num_pending, statistics.num_in_flight) == (0, 0)
    numbers = [(len(a) if isinstance(a, list) else 1, fate) for _, a, fate, _ in plans]
    least = sum(number for number, fate in numbers if fate == "await")
    assert least <= statistics.num_submitted <= sum(number for number, _ in numbers)
    batcher.close()


async def test_queries_with_one_forward_key_count_once_to_the_batch_size(recorder):
    policy = BatchPolicy(max_batch_size=4, timeout=1000.0)
    batcher = Batcher(recorder, policy, forward_key=lambda query: query % 7)
    queries = [*range(60), *range(100, 170, 7)]
    results = await asyncio.gather(*map(batcher.submit, queries))
    assert results == [2 * query for query in queries]
    batcher.close()
    assert [query for batch in recorder.batches for query in batch] == queries
    assert max(len({query % 7 for query in batch}) for batch in recorder.batches) == 4
    assert max(map(len, recorder.batches)) >= 11  # the last ones are alike


async def test_weights_bound_a_batch_and_an_oversized_query_runs_alone(recorder):
    def weight(query):
        return (0.25, 2.0, 9.0)[query // 100]

    batcher = Batcher(recorder, BatchPolicy(max_batch_size=4, timeout=1000.0), weight=weight)
    queries = [*range(20), 100, 101, 200, 20, 102, 201, 103]
    results = await asyncio.gather(*map(batcher.submit, queries))
    assert results == [2 * query for query in queries]
    batcher.close()
    assert [query for batch in recorder.batches for query in batch] == queries
    for batch in recorder.batches:
        assert len(batch) == 1 or sum(map(weight, batch)) <= 4
    assert 4 < max(map(len, recorder.batches)) <= 16
