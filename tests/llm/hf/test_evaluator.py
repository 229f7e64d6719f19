"""What is computed, what is reused, and what happens when there is no room."""

import asyncio
import dataclasses
import random
import threading
import time

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend.errors import CacheError, OptionError, QueryDroppedError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row
from tests.tree_integrity import check_integrity

SLOT = 2 * 2 * 2 * 8 * 4
PROMPT = [random.Random(1).randrange(families.VOCAB) for _ in range(51)]


@pytest.fixture
def make(tiny_llama):
    models = []

    def make(**options):
        options = {"kv_cache_bytes": 4000 * SLOT, **options}
        models.append(AsyncTransformer(tiny_llama, word_tokenizer(), **options))
        return models[-1]

    yield make
    for lm in models:
        check_integrity(lm._evaluator.scheduler.tree)
        lm.close()


def check(lm, contexts):
    rows = lm.batch_next_token_logprobs_sync(contexts)
    for context, row in zip(contexts, rows, strict=True):
        torch.testing.assert_close(row, naive_row(lm.model, context), rtol=0, atol=2e-5)


async def test_step_computes_one_token_per_particle(make):
    lm = make()
    await lm.batch_next_token_logprobs([PROMPT] * 20)
    assert lm.statistics().tokens_computed == 51
    particles = [[*PROMPT, i] for i in range(20)]
    for step in range(5):
        before = lm.statistics()
        check(lm, particles)
        after = lm.statistics()
        assert after.tokens_computed - before.tokens_computed == 20
        assert after.num_forwards - before.num_forwards == 1
        assert after.tokens_reused - before.tokens_reused == 20 * (51 + step)
        particles = [[*p, (7 * i + step) % 96] for i, p in enumerate(particles)]


async def test_smc_with_resampling_computes_exactly_the_distinct_new_tokens(make):
    lm = make()
    generator = random.Random(0)
    particles, seen = [list(PROMPT) for _ in range(20)], set()
    for step in range(16):
        await asyncio.gather(*map(lm.next_token_logprobs, particles))
        seen.update(tuple(p[: n + 1]) for p in particles for n in range(len(p)))
        assert lm.statistics().tokens_computed == len(seen)
        assert lm.statistics().kv_bytes_used == len(seen) * SLOT
        particles = [[*p, generator.randrange(4)] for p in particles]
        if step % 4 == 3:
            particles = particles[:10] + [list(p) for p in particles[:10]]
    assert set(lm.statistics().batch_sizes) <= set(range(1, 21))


def test_long_prefill_is_computed_in_chunks(make):
    from dataclasses import replace

    lm = make()
    lm._evaluator.scheduler.cost = replace(lm._evaluator.scheduler.cost, max_chunk=16)
    check(lm, [PROMPT, PROMPT[:40], [*PROMPT[:33], 5, 6, 7], [1, 2]])
    assert lm.statistics().num_forwards >= 4
    assert lm.statistics().tokens_computed == 51 + 3 + 2


@pytest.mark.parametrize("capacity", [0, 1, 5, 52, 60, 75, 300])
def test_rows_are_right_at_any_cache_capacity(make, capacity):
    lm = make(kv_cache_bytes=(capacity + 1) * SLOT if capacity else 0, row_cache_bytes=0)
    generator = random.Random(capacity)
    particles = [[*PROMPT, i] for i in range(8)]
    for _ in range(6):
        check(lm, particles)
        check_integrity(lm._evaluator.scheduler.tree)
        assert lm.statistics().kv_bytes_used <= capacity * SLOT
        particles = [[*generator.choice(particles), generator.randrange(96)] for _ in particles]


@pytest.mark.parametrize("num_bytes", [1, 64, 2 * SLOT - 1])
def test_a_budget_below_one_token_is_refused(make, num_bytes):
    with pytest.raises(OptionError, match=f"{num_bytes} has no room for one token and a reserved"):
        make(kv_cache_bytes=num_bytes)


def test_a_pinned_prompt_is_never_evicted_until_cleared(make):
    lm = make(kv_cache_bytes=81 * SLOT, row_cache_bytes=0)
    lm.cache_kv(PROMPT)
    for i in range(30):
        check(lm, [[i, i, i, i, i, i]])
    before = lm.statistics()
    check(lm, [[*PROMPT, 3]])
    after = lm.statistics()
    assert after.tokens_computed - before.tokens_computed == 1
    with pytest.raises(CacheError, match="does not fit"):
        lm.cache_kv(list(range(40)))
    lm.clear_kv_cache()
    assert lm.statistics().kv_bytes_used == 0
    check(lm, [[*PROMPT, 4]])
    lm.cache_kv(list(range(40)))
    lm.clear_cache()
    assert lm.statistics().kv_bytes_used == lm.statistics().row_bytes_used == 0


def test_clear_during_batch_takes_effect_after_it(make):
    lm = make()
    forward, clearing = lm._evaluator.scheduler.runner.forward, []

    def clear_then_forward(*args):
        thread = threading.Thread(target=lm.clear_cache)
        clearing.append(thread)
        thread.start()
        while lm._batcher._worker._calls.empty():  # until it waits
            time.sleep(0.001)
        return forward(*args)

    lm._evaluator.scheduler.runner.forward = clear_then_forward
    check(lm, [[*PROMPT, i] for i in range(4)])
    clearing[0].join()
    assert lm.statistics().row_bytes_used == 0  # computed before the caches were cleared
    assert lm.statistics().kv_bytes_used == 0
    lm._evaluator.scheduler.runner.forward = forward
    check(lm, [[*PROMPT, i] for i in range(2, 6)])
    check_integrity(lm._evaluator.scheduler.tree)
    lm.clear_cache()
    assert lm.statistics().kv_bytes_used == 0


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_halves_batch_before_failing_any_query(make, error):
    lm = make()
    forward, sizes = lm._evaluator.scheduler.runner.forward, []

    def limited(batch, attend):
        sizes.append(batch.num_rows)
        if batch.num_rows > 2:
            raise error
        return forward(batch, attend)

    lm._evaluator.scheduler.runner.forward = limited
    check(lm, [[i, 5, 6] for i in range(8)])
    assert max(sizes) == 8
    assert sizes.count(2) == 4

    def always(spans, attend):
        raise error

    lm._evaluator.scheduler.runner.forward = always
    with pytest.raises(type(error)):
        lm.next_token_logprobs_sync([1, 2, 3, 4])
    lm._evaluator.scheduler.runner.forward = forward
    check(lm, [[1, 2, 3, 4]])


async def test_context_that_always_runs_out_of_memory_fails_alone(make):
    lm = make(row_cache_bytes=0)
    runner, contexts = lm._evaluator.scheduler.runner, [[i, 5, 6] for i in range(8)]
    forward = runner.forward

    def limited(batch, attend):
        if (batch.input_ids == 3).any():
            raise MemoryError
        return forward(batch, attend)

    runner.forward = limited
    found = await asyncio.gather(*map(lm.next_token_logprobs, contexts), return_exceptions=True)
    assert isinstance(found.pop(3), MemoryError)
    runner.forward = forward
    for context, row in zip(contexts[:3] + contexts[4:], found, strict=True):
        torch.testing.assert_close(row, naive_row(lm.model, context), atol=1e-4, rtol=0)
    check_integrity(lm._evaluator.scheduler.tree)


def test_other_errors_are_not_retried_and_leak_no_slot(make):
    lm = make()
    check(lm, [PROMPT[:20]])
    used, calls = lm.statistics().kv_bytes_used, []
    forward = lm._evaluator.scheduler.runner.forward

    def broken(batch, attend):
        calls.append(batch.num_rows)
        raise IndexError("by the test")

    lm._evaluator.scheduler.runner.forward = broken
    with pytest.raises(IndexError):
        lm.batch_next_token_logprobs_sync([PROMPT, PROMPT[:40]])
    assert len(calls) == 1
    assert lm.statistics().kv_bytes_used == used
    lm._evaluator.scheduler.runner.forward = forward
    check(lm, [PROMPT, PROMPT[:40]])


def test_clearing_cache_from_another_thread_changes_no_row(make):
    lm = make(row_cache_bytes=0, batch_size=4)
    contexts = [[*PROMPT[: 5 + i % 20], i % 96] for i in range(60)]
    expected = torch.stack([naive_row(lm.model, context) for context in contexts])
    is_over = threading.Event()

    def clear():
        while not is_over.wait(0.001):
            lm.clear_cache()
            lm.statistics()

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for _ in range(5):
            rows = lm.batch_next_token_logprobs_sync(contexts)
            torch.testing.assert_close(rows, expected, rtol=0, atol=2e-5)
    finally:
        is_over.set()
        thread.join()
    lm.clear_cache()
    assert lm.statistics().kv_bytes_used == 0


@pytest.fixture
def chunked(make):
    """A model that takes four tokens of a context at a time, held in its first forward pass."""
    lm = make()
    lm._evaluator.scheduler.cost = dataclasses.replace(lm._evaluator.scheduler.cost, max_chunk=4)
    lm.is_held, lm.may_go_on = threading.Event(), threading.Event()

    def hold(*_):
        lm.is_held.set()
        assert lm.may_go_on.wait(30)

    hook = lm.model.register_forward_pre_hook(hold)
    yield lm
    hook.remove()


async def test_cancelled_context_stops_between_two_passes(chunked):
    task = asyncio.ensure_future(chunked.next_token_logprobs(PROMPT))
    await asyncio.to_thread(chunked.is_held.wait, 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    chunked.may_go_on.set()
    check(chunked, [[5]])  # comes behind it
    assert chunked.statistics().num_forwards == 2
    assert await chunked.num_cached_tokens(PROMPT) == 4  # what was computed is kept
    check(chunked, [PROMPT, PROMPT[:20]])
    assert chunked.statistics().tokens_reused == 2 * 4
    check_integrity(chunked._evaluator.scheduler.tree)


async def test_context_with_remaining_waiter_continues_after_cancellation(chunked):
    tasks = [asyncio.ensure_future(chunked.next_token_logprobs(PROMPT)) for _ in range(2)]
    await asyncio.to_thread(chunked.is_held.wait, 30)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    chunked.may_go_on.set()
    row = await tasks[1]
    torch.testing.assert_close(row, naive_row(chunked.model, PROMPT), rtol=0, atol=2e-5)
    assert chunked.statistics().num_forwards == 13


async def test_close_waits_for_current_pass_and_not_for_whole_context(chunked):
    task = asyncio.ensure_future(chunked.next_token_logprobs(PROMPT))
    await asyncio.to_thread(chunked.is_held.wait, 30)
    closing = asyncio.ensure_future(asyncio.to_thread(chunked.close))
    with pytest.raises(QueryDroppedError):
        await task
    chunked.may_go_on.set()
    await closing
    assert chunked.statistics().num_forwards == 1


async def test_overflowed_keys_of_cancelled_context_are_not_cached(chunked):
    def overflow(*_):
        chunked._evaluator.scheduler.cache.pool.codes[0][0].fill_(torch.inf)

    task = asyncio.ensure_future(chunked.next_token_logprobs(PROMPT))
    await asyncio.to_thread(chunked.is_held.wait, 30)
    running = chunked._evaluator.scheduler.runner.view.module
    hook = running.register_forward_hook(overflow)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    chunked.may_go_on.set()
    chunked._batcher.call(lambda: None)  # comes behind it
    hook.remove()
    assert await chunked.num_cached_tokens(PROMPT) == 0
    check_integrity(chunked._evaluator.scheduler.tree)
