"""What is asked behind ``clear_cache()`` comes from no block of before, samples or not."""

import asyncio
import copy

import pytest
import torch

from genlm_backend import AsyncVirtualLM
from tests.llm.conftest import fresh_row
from tests.llm.vllm import real

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module", params=["0", "1"], ids=["here", "in a process of its own"])
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


async def test_no_block_is_used_again_and_samples_go_on_as_they_were(lm):
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


async def test_weights_that_change_beside_a_sample(lm):
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
        torch.testing.assert_close(row, fresh_row(model, longer), rtol=0, atol=1e-4)
    sample.cancel()


def test_clearing_is_no_step(lm):
    lm.next_token_logprobs_sync([1, 2, 3])
    before = lm.statistics().num_forwards
    lm.clear_cache()
    lm.clear_cache()
    assert lm.statistics().num_forwards == before
