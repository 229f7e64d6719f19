"""vLLM with very few blocks: whatever fits alone is answered, and from what has been computed."""

import asyncio
import random
import time

import pytest
import torch

from genlm_backend import AsyncVirtualLM
from genlm_backend.backends.vllm.completion import Completion
from genlm_backend.errors import AdapterError, QueryDroppedError
from genlm_backend.queries.query import RowQuery
from tests.llm.families import VOCAB
from tests.llm.vllm import real
from tests.naive import naive_row

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


@pytest.fixture(
    scope="module",
    params=["0", pytest.param("1", marks=pytest.mark.slow)],
    ids=["here", "in a process of its own"],
)
def lm(request):
    real.close_tiny_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", request.param)
        engine = real.load_tiny(
            block_size=32,
            num_gpu_blocks_override=12,  # one is vLLM's own
            max_num_seqs=8,
            long_prefill_token_threshold=1,  # contexts side by side take many steps
        )
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        yield lm


def contexts(*sizes):
    randomness = random.Random(0)
    return [[randomness.randrange(VOCAB) for _ in range(size)] for size in sizes]


def check(row, context):
    expected = naive_row(real.tiny_model(), context)
    torch.testing.assert_close(row, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [33, 60, 97])
def test_rows_and_sample_competing_for_blocks_are_both_exact(lm, size):
    """The sample has ``size`` tokens when rows are asked, and goes on growing beside them."""
    base, other = contexts(100, 121)
    asked, planner = [[*base, *other[:20]], other], lm._vllm.planner
    lm.clear_cache()
    lm.next_token_logprobs_sync(base)
    sample = Completion(RowQuery([1, 2, 3, 4]), 250, [], 0.0, 1, 0, lm.max_length)

    def start():
        planner.start([sample], frozenset())
        while len(sample.token_ids) + 4 < size:
            planner.go_on()

    lm._call(start)
    for row, context in zip(lm.batch_next_token_logprobs_sync(asked), asked, strict=True):
        check(row, context)
    while not sample.future.done():
        lm._call(planner.go_on)
    with torch.no_grad():
        text = torch.tensor([[1, 2, 3, 4, *sample.future.result()]])
        rows = real.tiny_model()(input_ids=text).logits[0, 3:-1]
    assert len(rows) == 250
    assert (rows.amax(-1) - rows.gather(1, text[0, 4:, None])[:, 0]).max() < 1e-4


def test_rows_are_exact_for_a_fork_of_a_preempted_session(lm, monkeypatch):
    """The session has blocks again in the step that the fork begins in, and nothing in them."""
    from genlm_backend.backends.vllm.fork import ForkConnector

    if not lm._vllm.engine._core.is_local:
        pytest.skip("vLLM's scheduler is not here")
    base, other = contexts(45, 12)
    asked = [base + other, [*base, 7]]
    lm.clear_cache()
    lm.next_token_logprobs_sync(base)
    scheduler = lm._vllm.engine._core._client.engine_core.scheduler
    schedule, matched = scheduler.schedule, ForkConnector.get_num_new_matched_tokens
    pool, steps, taken = scheduler.kv_cache_manager.block_pool, [], []

    def schedule_and_preempt(*args):
        steps.append(len(scheduler.running))
        if len(steps) == 2:  # as for a sample that takes a block
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
            taken.extend(pool.get_new_blocks(1))
        return schedule(*args)

    def matched_later(self, request, num_computed_tokens):
        if request.kv_transfer_params and len(steps) == 1:
            return None, False  # as where there is no room for it in the first step
        return matched(self, request, num_computed_tokens)

    monkeypatch.setattr(scheduler, "schedule", schedule_and_preempt)
    monkeypatch.setattr(ForkConnector, "get_num_new_matched_tokens", matched_later)
    rows = lm.batch_next_token_logprobs_sync(asked)
    pool.free_blocks(taken)
    for row, context in zip(rows, asked, strict=True):
        check(row, context)
    assert steps[:2] == [0, 1]


def test_cancelled_sample_ends_at_the_next_step(lm):
    planner, (context,) = lm._vllm.planner, contexts(40)
    sample = Completion(RowQuery([1, 2, 3, 4]), 240, [], 0.0, 1, 0, lm.max_length)

    def ask():
        planner.start([sample], frozenset())
        planner.go_on()
        sample.future.cancel()
        (row,) = planner.evaluate([RowQuery(context)], lambda: None)
        return row, dict(planner._engine.completions)

    row, left = lm._call(ask)
    assert left == {}
    assert len(sample.token_ids) <= 2
    check(row.logprobs, context)


def test_dropped_query_waiting_for_blocks_leaves_the_sample_intact(lm):
    planner, (context,) = lm._vllm.planner, contexts(240)
    sample = Completion(RowQuery([1, 2, 3, 4]), 250, [], 0.0, 1, 0, lm.max_length)
    num_sampled = []

    def check_cancelled():
        num_sampled.append(len(sample.token_ids))
        if len(num_sampled) > 3:
            raise QueryDroppedError("nobody waits for it any more")

    def ask():
        planner.start([sample], frozenset())
        while len(sample.token_ids) < 190:
            planner.go_on()
        with pytest.raises(QueryDroppedError):
            planner.evaluate([RowQuery(context)], check_cancelled)
        while not sample.future.done():
            planner.go_on()

    lm._call(ask)
    assert num_sampled[-1] > 190  # the row waited for room
    assert len(sample.future.result()) == 250
    check(lm.next_token_logprobs_sync(context), context)


async def test_samples_of_a_prompt_prefilled_in_chunks_repeat_with_the_seed(lm):
    """With seeds, of which vLLM draws a number for each piece."""
    (prompt,) = contexts(50)
    lm.clear_cache()
    before = lm.statistics().tokens_computed
    samples = await lm.batch_sample([prompt] * 3, 9, [], seed=5)
    assert lm.statistics().tokens_computed - before == 50  # once
    assert [len(sample) for sample in samples] == [9] * 3
    assert len({tuple(sample) for sample in samples}) > 1
    assert await lm.batch_sample([prompt] * 3, 9, [], seed=5) == samples


async def test_samples_beyond_half_of_max_num_seqs_compute_each_prompt_once(lm, monkeypatch):
    if not lm._vllm.engine._core.is_local:
        pytest.skip("vLLM's scheduler is not here")
    prompts = contexts(*[20] * 5)  # vLLM takes eight
    lm.clear_cache()
    scheduler = lm._vllm.engine._core._client.engine_core.scheduler
    schedule, num_tokens = scheduler.schedule, []

    def schedule_and_count(*args):
        step = schedule(*args)
        num_tokens.append(step.total_num_scheduled_tokens)
        return step

    monkeypatch.setattr(scheduler, "schedule", schedule_and_count)
    samples = await lm.batch_sample(prompts, 9, [], seed=5)
    assert sum(num_tokens) == sum(map(len, prompts)) + sum(map(len, samples))
    alone = await lm.batch_sample(prompts[:1], 9, [], seed=5)
    assert alone == samples[:1]


async def test_samples_of_short_prompts_are_unchanged_by_clear_cache(lm):
    """Prompts of less than a block, many callers, and all anew behind ``clear_cache()``."""
    prompts = contexts(*[20] * 6)
    lm.clear_cache()
    alone = [await lm.sample(prompt, 40, [], seed=5) for prompt in prompts]
    sampling = [asyncio.ensure_future(lm.sample(prompt, 40, [], seed=5)) for prompt in prompts]
    for _ in range(3):
        await lm.next_token_logprobs([1, 2])  # a step or two
        lm.clear_cache()
    assert await asyncio.gather(*sampling) == alone


def test_adapter_on_an_engine_without_lora_names_enable_lora(lm):
    with pytest.raises(AdapterError, match=r"engine_opts=\{'enable_lora': True\}"):
        lm.add_new_lora("/nowhere", "poet")
    check(lm.next_token_logprobs_sync([1, 2]), [1, 2])
