"""What every backend owes its callers."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genlm_backend.errors import (
    AdapterError,
    BatcherClosedError,
    QueryDroppedError,
    UnknownAdapterError,
)
from tests.llm.families import VOCAB

TOLERANCE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(autouse=True)
def tolerance(request, monkeypatch):
    if "backend" in request.fixturenames:
        monkeypatch.setitem(TOLERANCE, "atol", request.getfixturevalue("backend").tolerance)


def close(row, expected):
    torch.testing.assert_close(row, expected, **TOLERANCE)


def random_contexts(count, seed=0, max_length=12):
    generator = random.Random(seed)
    return [
        [generator.randrange(VOCAB) for _ in range(generator.randint(1, max_length))]
        for _ in range(count)
    ]


# -------------------------------------------------------------------- rows


async def test_a_row_is_a_distribution_over_the_whole_vocabulary(lm):
    row = await lm.next_token_logprobs([1, 2, 3])
    assert (row.shape, row.dtype, row.device.type) == ((VOCAB,), torch.float32, "cpu")
    assert len(lm.byte_vocab) == len(lm.str_vocab) == VOCAB
    assert float(row.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert not row.requires_grad


def test_all_four_ways_to_ask_give_the_fresh_answer(lm, backend):
    contexts = random_contexts(7)
    expected = torch.stack([backend.expected(context) for context in contexts])

    async def main():
        single = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
        close(torch.stack(single), expected)
        close(await lm.batch_next_token_logprobs(contexts), expected)
        close(lm.next_token_logprobs_sync(contexts[3]), expected[3])  # inside a running loop
        close(lm.batch_next_token_logprobs_sync(contexts), expected)

    asyncio.run(main())
    lm.clear_cache()
    close(lm.next_token_logprobs_sync(contexts[2]), expected[2])
    close(lm.batch_next_token_logprobs_sync(contexts), expected)


async def test_logits_are_the_rows_before_they_are_normalised(lm, backend):
    for context in ([1, 2, 3], [1, 2, 3], [4]):
        logits = await lm.next_token_logits(context)
        assert logits.shape == (VOCAB,)
        close(logits.log_softmax(-1), backend.expected(context))
        if (model := backend.bare_model()) is not None:
            with torch.no_grad():
                expected = model(input_ids=torch.tensor([context])).logits[0, -1]
            close(logits, expected.float())
        logits.zero_()


def test_different_contexts_have_different_rows(lm):
    rows = lm.batch_next_token_logprobs_sync([[1, 2, 3], [1, 2, 4], [4, 2, 3], [3, 2, 1], [1, 2]])
    for i in range(5):
        for j in range(i):
            assert float((rows[i] - rows[j]).abs().max()) > 1e-2


async def test_a_batch_keeps_order_and_repetitions_and_may_be_empty(lm):
    contexts = [[5], [6], [5], [7], [6]]
    rows = lm.batch_next_token_logprobs_sync(contexts)
    for context, row in zip(contexts, rows, strict=True):
        close(row, lm.next_token_logprobs_sync(context))
    assert lm.batch_next_token_logprobs_sync([]).shape == (0, VOCAB)
    assert (await lm.batch_next_token_logprobs([])).shape == (0, VOCAB)


async def test_a_row_is_the_callers_to_change(lm, backend):
    rows = await asyncio.gather(*(lm.next_token_logprobs([1, 2]) for _ in range(3)))
    rows[0].fill_(7.0)
    rows[1].mul_(0.0)
    close(rows[2], backend.expected([1, 2]))
    close(await lm.next_token_logprobs([1, 2]), backend.expected([1, 2]))
    row = lm.next_token_logprobs_sync([1, 2])
    row.requires_grad_().sum().backward()  # an ordinary tensor, not an inference one
    close(lm.next_token_logprobs_sync([1, 2]), backend.expected([1, 2]))


async def test_more_contexts_than_fit_a_batch(backend):
    contexts = random_contexts(23)
    with backend.make(batch_size=4) as lm:
        rows = await lm.batch_next_token_logprobs(contexts)
        assert max(lm.statistics().batch_sizes) <= 4
        assert lm.batch_size == 4
    close(rows, torch.stack([backend.expected(context) for context in contexts]))


async def test_equal_contexts_are_computed_once(lm):
    await asyncio.gather(*(lm.next_token_logprobs([1, 2, 3]) for _ in range(20)))
    statistics = lm.statistics()
    assert dict(statistics.batch_sizes) == {1: 1}
    assert (statistics.num_awaits, statistics.num_joined) == (20, 19)
    assert statistics.tokens_computed in (0, 3)  # a mock computes none


@pytest.mark.parametrize(
    "context",
    [
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        [np.int64(1), np.int32(2), 3],
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int16),
    ],
    ids=lambda context: type(context).__name__,
)
def test_integers_of_every_kind_are_a_context(context, backend):
    with backend.make() as lm:
        close(lm.next_token_logprobs_sync(context), backend.expected([1, 2, 3]))


# -------------------------------------------------------------------- bad input

BAD = [
    ([], ValueError, "empty"),
    (np.array([], dtype=np.int64), ValueError, "empty"),
    ([1, True], TypeError, "True"),
    ([1, 2.0], TypeError, "2.0"),
    ([1, "2"], TypeError, "'2'"),
    ([1, None], TypeError, "None"),
    (["ab"], TypeError, "'ab'"),
    ("text", TypeError, "encode the text"),
    (b"text", TypeError, "encode the text"),
    (5, TypeError, "5"),
    (None, TypeError, "None"),
    (torch.tensor([[1, 2]]), TypeError, "one dimension"),
    (np.array([1.0, 2.0]), TypeError, "1.0"),
    (torch.tensor([True, False]), TypeError, "True"),
    ([0, VOCAB], ValueError, f"token id {VOCAB} .* {VOCAB} ids"),
    ([-1], ValueError, "token id -1"),
]


@pytest.mark.parametrize(("context", "kind", "message"), BAD, ids=lambda x: repr(x)[:20])
async def test_bad_input_is_refused_before_anything_is_queued(lm, backend, context, kind, message):
    good = asyncio.ensure_future(lm.next_token_logprobs([3, 4]))
    await asyncio.sleep(0)
    before = lm.statistics().num_awaits
    with pytest.raises(kind, match=message):
        await lm.next_token_logprobs(context)
    with pytest.raises(kind, match=message):
        await lm.batch_next_token_logprobs([[1], context])
    with pytest.raises(kind, match=message):
        lm.next_token_logprobs_sync(context)
    with pytest.raises(kind, match=message):
        lm.batch_next_token_logprobs_sync([[1], context])
    assert lm.statistics().num_awaits == before
    close(await good, backend.expected([3, 4]))


def test_a_context_beyond_the_maximum_is_refused_with_both_lengths(backend):
    with backend.make(max_length=6) as lm:
        lm.next_token_logprobs_sync([1] * 6)
        with pytest.raises(ValueError, match=r"7 tokens.*maximum of 6"):
            lm.next_token_logprobs_sync([1] * 7)


async def test_an_adapter_that_is_not_loaded_is_refused(lm):
    for ask, context in (
        (lm.next_token_logprobs_sync, [1]),
        (lm.batch_next_token_logprobs_sync, [[1]]),
    ):
        ask(context, lora_name=None)
        with pytest.raises(ValueError, match="'polite'"):
            ask(context, lora_name="polite")
    for ask, context in ((lm.next_token_logprobs, [1]), (lm.batch_next_token_logprobs, [[1]])):
        await ask(context, lora_name=None)
        with pytest.raises(ValueError, match="'polite'"):
            await ask(context, lora_name="polite")


def test_adapters_are_loaded_and_removed_or_refused(lm):
    with pytest.raises(AdapterError, match="polite"):
        lm.add_new_lora("/nowhere/polite", "polite")
    with pytest.raises(UnknownAdapterError, match="'polite'"):
        lm.remove_lora("polite")
    with pytest.raises(AdapterError, match="lora_name="):
        lm.set_lora("/nowhere/polite", "polite")
    with pytest.raises(AdapterError, match="lora_name="):
        lm.clear_lora()
    assert not lm.next_token_logprobs_sync([1]).isnan().any()


# -------------------------------------------------------------------- trouble


async def test_tokens_that_are_cached_are_counted(lm):
    assert await lm.num_cached_tokens([1, 2, 3, 4, 5]) == 0
    await lm.next_token_logprobs([1, 2, 3, 4])
    found = [await lm.num_cached_tokens(c) for c in ([1, 2, 3, 4, 5], [1, 2, 9, 9], [7])]
    has_memory = lm.kv_capacity is not None
    assert found == ([4, 2, 0] if has_memory else [0, 0, 0])
    if lm.can_forget:
        await lm.forget([1, 2, 3, 4], keep=1)
        assert await lm.num_cached_tokens([1, 2, 3, 4, 5]) == int(has_memory)
        await lm.forget([1, 2] * (lm.max_length or 100))  # longer than anybody may ask
    lm.clear_cache()
    assert await lm.num_cached_tokens([1, 2, 3, 4, 5]) == 0


async def test_cancelled_and_timed_out_callers_leave_the_others(lm, backend):
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


async def test_an_exception_reaches_its_batch_and_the_next_call_works(lm, backend):
    evaluator = lm._evaluator
    evaluate = evaluator.evaluate

    def broken(queries):
        evaluator.evaluate = evaluate
        raise ZeroDivisionError("by the test")

    evaluator.evaluate = broken
    results = await asyncio.gather(
        *(lm.next_token_logprobs([i]) for i in range(4)), return_exceptions=True
    )
    assert [type(result) for result in results] == [ZeroDivisionError] * 4
    close(await lm.next_token_logprobs([2]), backend.expected([2]))
    evaluator.evaluate = broken
    with pytest.raises(ZeroDivisionError):
        lm.next_token_logprobs_sync([9])
    close(lm.next_token_logprobs_sync([9]), backend.expected([9]))


def test_successive_loops_simultaneous_loops_and_threads(lm, backend):
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


async def test_reset_async_queries_settles_every_waiter(lm, backend):
    tasks = [asyncio.ensure_future(lm.next_token_logprobs([i])) for i in range(5)]
    await asyncio.sleep(0)
    lm.reset_async_queries()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [QueryDroppedError] * 5
    assert "reset_async_queries" in str(results[0])
    close(await lm.next_token_logprobs([2]), backend.expected([2]))


async def test_batch_evaluate_queries_flushes(backend):
    with backend.make(timeout=1000.0) as lm:
        task = asyncio.ensure_future(lm.next_token_logprobs([1, 2]))
        await asyncio.sleep(0)
        lm.batch_evaluate_queries()
        close(await task, backend.expected([1, 2]))


def test_batch_size_and_timeout_can_be_set(backend):
    with backend.make(batch_size=20, timeout=1000.0) as lm:
        lm.batch_size = np.int64(2)
        assert (lm.batch_size, lm.timeout) == (2, 1000.0)
        contexts = [[i] for i in range(1, 6)]
        rows = lm.batch_next_token_logprobs_sync(contexts)
        assert lm.statistics().batch_sizes == {1: 1, 2: 2}
        lm.batch_size = 4
        lm.timeout = 0.5
        assert (lm.batch_size, lm.timeout) == (4, 0.5)
        lm.batch_next_token_logprobs_sync([[7, i] for i in range(1, 5)])
        assert lm.statistics().batch_sizes == {1: 1, 2: 2, 4: 1}
        for name, value, error in (
            ("batch_size", 0, ValueError),
            ("batch_size", "2", TypeError),
            ("batch_size", True, TypeError),
            ("timeout", -1, ValueError),
            ("timeout", "0.1", TypeError),
            ("timeout", None, TypeError),
        ):
            with pytest.raises(error, match=name):
                setattr(lm, name, value)
        assert (lm.batch_size, lm.timeout) == (4, 0.5)
    for context, row in zip(contexts, rows, strict=True):
        close(row, backend.expected(context))


async def test_after_close_every_method_says_so(backend):
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


# -------------------------------------------------------------------- whatever the caches hold

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
def test_no_history_of_particles_changes_an_answer(backend, steps):
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
        if hasattr(lm._evaluator, "passes"):
            lm._evaluator.passes.tree.check_integrity()
