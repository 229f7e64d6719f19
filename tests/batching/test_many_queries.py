"""A caller who asks many queries at once is one caller, with one answer or one error."""

import asyncio
import contextlib
import gc
import sys

import numpy as np
import pytest

from genlm_backend.batching import Batcher, BatchPolicy, pending_query, policy
from genlm_backend.errors import EvaluationError, OptionError, QueryDroppedError
from tests.batching.test_cancellation import PATIENT, passes, until_held


async def test_cancelled_submit_all_skips_only_unshared_queries(recorder):
    batcher = Batcher(recorder, PATIENT)
    many = asyncio.ensure_future(batcher.submit_all([1, 2, 3, 2]))
    other = asyncio.ensure_future(batcher.submit_all([3, 4]))
    await passes(1)
    many.cancel()
    assert await other == [6, 8]
    assert recorder.batches == [[3, 4]]
    assert batcher.statistics().num_skipped == 2
    batcher.close()


async def test_submit_all_raises_first_error_and_stops_evaluating_the_rest(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=2, timeout=1000.0))
    recorder.error = ArithmeticError("broken")
    other = asyncio.ensure_future(batcher.submit(6))
    await passes(1)
    recorder.hold()
    asked = asyncio.ensure_future(batcher.submit_all([0, 1, 2, 3, 6]))
    await until_held(recorder)
    recorder.let_go()
    with pytest.raises(ArithmeticError):
        await asked
    with pytest.raises(ArithmeticError):
        await other
    recorder.error = None
    assert await batcher.submit(9) == 18
    assert recorder.batches[0] == [6, 0]
    assert {query for batch in recorder.batches[1:] for query in batch} <= {1, 2, 9}
    batcher.close()


async def test_submit_all_with_a_failing_key_leaves_no_query_pending(recorder):
    batcher = Batcher(recorder, PATIENT, key=lambda query: 1 // query)
    with pytest.raises(ZeroDivisionError):
        await batcher.submit_all([3, 2, 0, 5])
    with pytest.raises(ZeroDivisionError):
        batcher.submit_sync([3, 2, 0, 5])
    assert batcher.statistics().num_pending == 0
    assert await batcher.submit_all([]) == []
    assert await batcher.submit(1) == 2
    assert recorder.batches == [[1]]
    batcher.close()


async def test_drop_counts_and_fails_submit_all_as_one_caller(recorder):
    batcher = Batcher(recorder, BatchPolicy(max_batch_size=2, timeout=1000.0))
    recorder.hold()
    many = asyncio.ensure_future(batcher.submit_all(range(5)))
    await until_held(recorder)
    assert batcher.drop() == 1
    recorder.let_go()
    with pytest.raises(QueryDroppedError):
        await many
    assert await batcher.submit(9) == 18
    assert recorder.batches == [[0, 1], [9]]
    batcher.close()


async def test_answer_ready_before_the_caller_waits_is_returned(monkeypatch):
    batcher = Batcher(lambda queries: [2 * query for query in queries], BatchPolicy(3))
    ask = batcher._ask

    def ask_and_be_answered(caller, loop, queries):
        asked = ask(caller, loop, queries)
        batcher.call(lambda: None)  # the worker has come this far
        return asked

    monkeypatch.setattr(batcher, "_ask", ask_and_be_answered)
    assert await batcher.submit_all([1, 2, 3]) == [2, 4, 6]
    assert batcher.submit_sync([4, 5, 6]) == [8, 10, 12]
    assert await asyncio.gather(*map(batcher.submit, (7, 8, 9))) == [14, 16, 18]
    batcher.close()


async def test_error_of_the_weight_function_leaves_other_queries_intact(recorder):
    batcher = Batcher(recorder, PATIENT, weight=lambda query: 1 / query)
    other = asyncio.ensure_future(batcher.submit(4))
    await passes(1)
    with pytest.raises(ZeroDivisionError):
        await batcher.submit_all([1, 0])
    assert await other == 8
    assert batcher.submit_sync([2]) == [4]
    batcher.close()


async def test_evaluate_may_return_a_numpy_array():
    batcher = Batcher(lambda queries: 2 * np.array(queries), PATIENT)
    assert await batcher.submit_all([1, 2]) == [2, 4]
    batcher.close()


@pytest.mark.parametrize("made", [dict.fromkeys, set, iter], ids=["dict", "set", "iterator"])
async def test_evaluate_result_that_is_no_sequence_raises_evaluation_error(made):
    results = [made]
    batcher = Batcher(lambda queries: results.pop()(queries) if results else queries)
    with pytest.raises(EvaluationError, match="must return a sequence"):
        await batcher.submit(5)
    assert await batcher.submit(5) == 5
    batcher.close()


async def test_queries_may_be_a_generator_that_calls_the_batcher(recorder):
    batcher = Batcher(recorder, PATIENT)
    asked = (batcher.submit_sync([i])[0] + batcher.statistics().num_pending for i in range(3))
    assert batcher.submit_sync(asked) == [0, 4, 8]
    assert await batcher.submit_all(batcher.submit_sync([i])[0] for i in range(3)) == [0, 4, 8]
    batcher.close()


@pytest.mark.parametrize("weight", [None, "x", [1], -1, float("nan"), 10**400])
async def test_invalid_weight_raises_option_error(recorder, weight):
    batcher = Batcher(recorder, PATIENT, weight=lambda query: weight if query == 1 else 1)
    with pytest.raises(OptionError, match="weight must return"):
        await batcher.submit_all([2, 1])
    assert await batcher.submit_all([2, 3]) == [4, 6]
    batcher.close()


def raising(kind, *args):
    def evaluate(queries):
        raise kind(*args)

    return evaluate


async def test_loop_pass_lost_to_an_interrupt_is_scheduled_again(recorder, monkeypatch):
    batcher = Batcher(recorder, PATIENT)
    assert await batcher.submit(1) == 2
    loop = asyncio.get_running_loop()
    batcher._quiet_detectors[
        loop
    ].is_scheduled = True  # the note was made, and the pass never asked for
    monkeypatch.setattr(policy, "LOST_SECONDS", 0.0)
    assert await asyncio.gather(*map(batcher.submit, range(5))) == [0, 2, 4, 6, 8]
    batcher.close()


@pytest.mark.parametrize("number", range(1, 12))
def test_loop_resumed_after_an_interrupt_answers_all_queries(number):
    batcher = Batcher(lambda queries: [2 * query for query in queries], PATIENT)
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(batcher.submit(i)) for i in range(3)]
    lines = iter(range(1, number))

    def interrupting(frame, event, argument):
        if event == "line" and next(lines, None) is None:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupting

    def of_passes(frame, event, argument):
        is_pass = frame.f_code in (Batcher._turn.__code__, policy.QuietDetector.tick.__code__)
        return interrupting if is_pass else None

    before = sys.gettrace()
    sys.settrace(of_passes)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asyncio.gather(*tasks))
    finally:
        sys.settrace(before)
    found = loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks), 30))
    assert found == [0, 2, 4]
    loop.close()
    batcher.close()


def own_errors(queries):
    return [ArithmeticError("refused") for _ in queries]


class Interrupting(asyncio.Future):
    is_armed = True

    def done(self):
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt
        return super().done()


async def test_interrupt_while_settling_futures_leaves_none_unsettled():
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(5)]
    futures[2] = Interrupting(loop=loop)
    with pytest.raises(KeyboardInterrupt):
        pending_query.settle_here(loop, [(future, [i]) for i, future in enumerate(futures)])
    found = await asyncio.gather(*futures)
    assert found == [[i] for i in range(5)]


@pytest.mark.parametrize(
    "evaluate",
    [list, own_errors, raising(ArithmeticError), raising(SystemExit, 3)],
    ids=["answered", "each refused", "all refused", "ended"],
)
async def test_callers_leave_nothing_to_the_garbage_collector(evaluate):
    def made(queries):
        return evaluate(queries)

    batcher = Batcher(made, PATIENT)

    async def ask():
        with contextlib.suppress(ArithmeticError, EvaluationError):
            await batcher.submit(1)
        with contextlib.suppress(ArithmeticError, EvaluationError):
            await batcher.submit_all(range(4))
        with contextlib.suppress(ArithmeticError, EvaluationError):
            batcher.submit_sync([1, 2])
        with contextlib.suppress(ArithmeticError, EvaluationError):
            batcher.call(lambda: made([1]))
        batcher.call(lambda: None)
        await passes(2)  # the loop has let go of what woke this

    await ask()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            await ask()
        assert gc.collect() == 0
    finally:
        gc.enable()
    batcher.close()


async def test_thousands_of_waiters_for_one_query_can_be_cancelled(recorder):
    batcher = Batcher(recorder, PATIENT)
    tasks = [asyncio.ensure_future(batcher.submit_all([7, 7])) for _ in range(5000)]
    await passes(1)
    for task in tasks[1:]:
        task.cancel()
    assert await tasks[0] == [14, 14]
    assert recorder.batches == [[7]]
    batcher.close()
