"""Replicas of vLLM, each an engine in a process of its own."""

import asyncio
import os
import signal

import pytest
import torch

from genlm_backend.backends.vllm.async_virtual_lm import VLLMLoader
from genlm_backend.errors import ModelNotFoundError, OptionTypeError
from genlm_backend.llm import AsyncReplicas, ProcessEvaluator
from tests.llm.conftest import word_tokenizer
from tests.llm.vllm import real
from tests.naive import naive_row

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


async def check(lm, contexts):
    rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    for row, context in zip(rows, contexts, strict=True):
        expected = naive_row(real.tiny_model(), context)
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
async def test_vllm_replicas_answer_exactly_and_restart_after_a_kill():
    load = VLLMLoader(real.tiny_folder(), real.TINY_OPTIONS)
    evaluators = [ProcessEvaluator(load) for _ in range(2)]
    with AsyncReplicas(word_tokenizer(), evaluators, row_cache_bytes=0) as lm:
        contexts = [[i, j, 5] for i in range(8) for j in range(4)]
        for token in range(4):
            await check(lm, contexts)
            contexts = [[*context, token] for context in contexts]
        assert all(replica.evaluator.counts().tokens_computed for replica in lm._set.replicas)
        row = await lm.next_token_logprobs([1, 2])
        drawn = await lm.draw_next_token([1, 2], allowed=[3, 4], temperature=0)
        assert drawn.token_id == 3 + int(row[3:5].argmax())
        scores = await lm.score([1, 2], [3])
        assert float(scores[0]) == pytest.approx(float(row[3]), abs=1e-4)
        assert await lm.sample([1, 2], 1, [], temperature=0) == [int(row.argmax())]
        os.kill(evaluators[0].process_id, signal.SIGKILL)
        await check(lm, contexts)
        await asyncio.to_thread(lm.restart)
        assert lm.num_alive == 2
        await check(lm, contexts[::-1])


def test_load_errors_of_vllm_replicas_reach_the_caller():
    with pytest.raises(OptionTypeError, match="engine_opts"):
        VLLMLoader("smollm2", ["float32"])
    with pytest.raises(OptionTypeError, match="model_name"):
        VLLMLoader(5)
    evaluators = [ProcessEvaluator(VLLMLoader("/no/such/model"))]
    with pytest.raises(ModelNotFoundError, match="/no/such/model"):
        AsyncReplicas(word_tokenizer(), evaluators)
