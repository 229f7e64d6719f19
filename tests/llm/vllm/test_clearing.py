"""What is asked behind ``clear_cache()`` comes from no block of before, samples or not."""

import asyncio
import copy
import time

import pytest
import torch

from genlm_backend import AsyncVirtualLM
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
        engine = real.load_tiny()
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        yield lm


async def num_reused(lm, text):
    """The number of a prompt's tokens that vLLM had when it scored what is behind them."""
    before = lm.statistics().tokens_reused
    await lm.score(text[:150], text[150:])
    return lm.statistics().tokens_reused - before


async def test_clear_cache_reuses_no_block_and_keeps_running_samples(lm):
    prompts, text = [[1, 2, 3], [5, 6]], [i * i % 61 for i in range(200)]
    alone = await lm.batch_sample(prompts, 250, [], seed=3)
    sample = asyncio.create_task(lm.batch_sample(prompts, 250, [], seed=3))
    row = await lm.next_token_logprobs(text)
    assert await num_reused(lm, text) > 100
    for _ in range(3):
        lm.clear_cache()
        assert await num_reused(lm, text) == 0
        torch.testing.assert_close(await lm.next_token_logprobs(text), row, rtol=0, atol=1e-4)
    assert await sample == alone


async def test_rows_after_clear_cache_use_weights_changed_while_sampling(lm):
    engine = lm._vllm.engine
    if not engine._core.is_local:
        pytest.skip("vLLM's model is not here")
    context, changed = [i * i % 61 for i in range(200)], copy.deepcopy(real.tiny_model())

    @torch.no_grad()
    def change(model):
        model.model.embed_tokens.weight.neg_()

    change(changed)
    sample = asyncio.create_task(lm.sample([1, 2, 3], 250, []))
    for model in (changed, real.tiny_model()):
        await lm.next_token_logprobs(context)
        lm._call(lambda: engine._llm.apply_model(change))
        lm.clear_cache()
        longer = [*context, 7]
        row = await lm.next_token_logprobs(longer)
        torch.testing.assert_close(row, naive_row(model, longer), rtol=0, atol=1e-4)
    sample.cancel()


def test_clear_cache_runs_no_forward_pass(lm):
    lm.next_token_logprobs_sync([1, 2, 3])
    before = lm.statistics().num_forwards
    lm.clear_cache()
    lm.clear_cache()
    assert lm.statistics().num_forwards == before


def test_fork_is_exact_if_its_source_recovers_blocks_in_the_same_step(lm, monkeypatch):
    """Two sessions lose their blocks; what the source finds is computed in the fork's step."""
    from genlm_backend.backends.vllm.fork import ForkConnector

    engine = lm._vllm.engine
    if not engine._core.is_local:
        pytest.skip("vLLM's scheduler is not here")
    base = [i * i % 61 for i in range(200)]
    beside = [*base[:150], *range(20)]  # a block of 128 tokens begins both
    lm.clear_cache()
    for context in (base, beside):
        lm.next_token_logprobs_sync(context)
    scheduler = engine._core._client.engine_core.scheduler
    schedule, matched = scheduler.schedule, ForkConnector.get_num_new_matched_tokens
    config, steps, sources = scheduler.scheduler_config, [], []

    def schedule_and_preempt(*args):
        steps.append(len(scheduler.running))
        # A token of each in the first step, so that none of them is done.
        config.long_prefill_token_threshold = 1 if len(steps) == 1 else 0
        if len(steps) == 2:
            while scheduler.running:  # so that the source comes back behind the other
                scheduler._preempt_request(scheduler.running.pop(0), time.monotonic())
            scheduler.kv_cache_manager.reset_prefix_cache()
        return schedule(*args)

    def matched_later(self, request, num_computed_tokens):
        if request.kv_transfer_params and len(steps) == 1:
            return None, False  # as where there is no room for it in the first step
        if request.kv_transfer_params:
            source = self._requests[request.kv_transfer_params["genlm_source"]]
            sources.append(source.num_computed_tokens)
        return matched(self, request, num_computed_tokens)

    if hasattr(scheduler, "skipped_waiting"):  # vLLM 0.30 would begin with the request it skipped
        order = lambda: scheduler.waiting or scheduler.skipped_waiting or None  # noqa: E731
        monkeypatch.setattr(scheduler, "_select_waiting_queue_for_scheduling", order)
    monkeypatch.setattr(scheduler, "schedule", schedule_and_preempt)
    monkeypatch.setattr(ForkConnector, "get_num_new_matched_tokens", matched_later)
    asked = [[*base, 2, 3], [*beside, 1, 2], [*base[:100], 3]]
    rows = lm.batch_next_token_logprobs_sync(asked)
    for row, context in zip(rows, asked, strict=True):
        expected = naive_row(real.tiny_model(), context)
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-4)
    assert steps[:2] == [0, 2]
    assert sources[-1] == 128  # behind that of the other session, which was a fork as well
