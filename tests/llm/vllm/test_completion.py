"""Samples that the engine draws by itself: each caller its own, and nobody waits for ever."""

import asyncio

import pytest
import torch

from genlm_backend import AsyncVirtualLM
from genlm_backend.errors import BatcherClosedError
from tests.llm.vllm.fake import FakeEngine


@pytest.fixture
def engine():
    return FakeEngine(max_sessions=4, num_blocks=500)


@pytest.fixture
def lm(engine):
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        yield lm


async def test_more_samples_than_places_are_unchanged_by_rows_between_them(lm, engine):
    for i in range(4):  # every place has an idle session
        await lm.next_token_logprobs([i])
    samples = asyncio.create_task(lm.batch_sample([[i] for i in range(20)], 6, [], seed=0))
    context = [7]
    while not samples.done():
        row = await lm.next_token_logprobs(context)
        context = [*context[-20:], int(row.argmax())]
    beside, alone = await samples, await lm.batch_sample([[i] for i in range(20)], 6, [], seed=0)
    assert beside == alone
    assert [len(sample) for sample in alone] == [6] * 20
    assert engine.completions == {}


async def test_cancelled_sample_ends_in_the_engine_and_leaves_others_intact(lm, engine):
    engine.may_sample.clear()
    tasks = [asyncio.create_task(lm.sample([i], 30, [], seed=i)) for i in range(3)]
    while len(engine.completions) < 3:
        await asyncio.sleep(0)
    tasks[1].cancel()
    engine.may_sample.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert results[2] == await lm.sample([2], 30, [], seed=2)
    assert engine.completions == {}


async def test_idle_sessions_leave_half_of_the_places_to_samples(lm, engine):
    for i in range(4):
        await lm.next_token_logprobs([i])
    await lm.batch_sample([[i] for i in range(6)], 5, [], seed=0)
    assert all(num_running >= min(2, num_there) for num_running, num_there in engine.num_sampled)


async def test_sampling_stops_soon_after_its_only_caller_is_cancelled(lm, engine):
    engine.may_sample.clear()
    task = asyncio.create_task(lm.sample([1], 60, []))
    while not engine.completions:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engine.may_sample.set()
    while engine.completions:
        await asyncio.sleep(0)
    assert len(engine.num_sampled) <= 2


async def test_failed_step_fails_all_its_samples_and_no_later_one(lm, engine):
    engine.may_sample.clear()
    samples = [asyncio.create_task(lm.sample([i], 60, [])) for i in range(3)]
    while len(engine.completions) < 3:
        await asyncio.sleep(0)
    engine.failures.append(ZeroDivisionError("in the engine"))
    engine.may_sample.set()
    results = await asyncio.gather(*samples, return_exceptions=True)
    assert [type(result) for result in results] == [ZeroDivisionError] * 3
    assert len(await lm.sample([1], 5, [])) == 5


async def test_failed_round_fails_its_rows_and_samples(lm, engine):
    engine.may_sample.clear()
    sample = asyncio.create_task(lm.sample([1], 1000, []))
    while not engine.completions:
        await asyncio.sleep(0)
    engine.failures.append(ZeroDivisionError("in the engine"))
    results = await asyncio.gather(sample, lm.next_token_logprobs([1]), return_exceptions=True)
    assert [type(result) for result in results] == [ZeroDivisionError] * 2
    row = await lm.next_token_logprobs([1, 2])
    assert torch.isfinite(row).all()


async def test_samples_failing_to_start_are_removed_from_the_engine(lm, engine, monkeypatch):
    def start(completion, *others):
        engine.completions[completion.id] = completion
        raise ZeroDivisionError("at the start")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "start", start)
        with pytest.raises(ZeroDivisionError):
            await lm.batch_sample([[1], [2]], 5, [])
    assert engine.completions == {}
    assert len(await lm.sample([1], 5, [])) == 5


async def test_close_fails_running_samples_with_batcher_closed_error(engine):
    lm = AsyncVirtualLM(engine)
    engine.may_sample.clear()
    tasks = [asyncio.create_task(lm.sample([i], 60, [])) for i in range(9)]
    while not engine.completions:
        await asyncio.sleep(0)
    await lm.aclose()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert [type(result) for result in results] == [BatcherClosedError] * 9
    with pytest.raises(BatcherClosedError):
        await lm.sample([1], 3, [])
    assert engine.is_closed


async def test_invalid_sampling_arguments_are_refused_before_any_step(lm, engine):
    for prompts, options in (
        ([[1], []], {}),
        ([[1], [9999]], {}),
        ([[1]], {"lora_name": "poet"}),
        ([[1]], {"temperature": -1}),
        ([[1]], {"temperature": 0.009}),
        ([[1]], {"max_tokens": -1}),
    ):
        with pytest.raises(ValueError, match=r"."):
            await lm.batch_sample(prompts, **{"max_tokens": 3, "eos_token_ids": [], **options})
    assert engine.num_steps == 0
    assert engine.completions == {}


def test_cache_size_and_cache_opts_bound_the_row_cache():
    with AsyncVirtualLM(FakeEngine(), 3, {"max_bytes": 1 << 20, "move_to_cpu": True}) as lm:
        for i in range(5):
            lm.next_token_logprobs_sync([i])
        assert len(lm._rows) == 3
        lm.next_token_logprobs_sync([4])
        assert lm.statistics().row_cache_hits == 1
    with AsyncVirtualLM(FakeEngine(), cache_opts={"max_bytes": 0}) as lm:
        lm.next_token_logprobs_sync([1])
        assert len(lm._rows) == 0
    with pytest.raises(TypeError, match="max_byte"):
        AsyncVirtualLM(FakeEngine(), cache_opts={"max_byte": 1})
    with pytest.raises(ValueError, match="cache_size"):
        AsyncVirtualLM(FakeEngine(), cache_size=-1)
