"""Queries that fail leave nothing behind, on whatever answers them."""

import asyncio
import gc

import pytest

from genlm_backend import AsyncReplicas, AsyncTransformer, MockAsyncLM
from genlm_backend.llm import StatelessEvaluator
from tests.llm import families
from tests.llm.conftest import word_tokenizer


def fail(*arguments):
    raise ArithmeticError("by the test")


class Failing(StatelessEvaluator):
    def evaluate(self, queries):
        fail()


def replicas():
    made = [Failing(), Failing()]
    for one in made:
        one.open = MockAsyncLM(word_tokenizer())._evaluator.open
    return AsyncReplicas(word_tokenizer(), made)


def transformer():
    lm = AsyncTransformer(families.make("llama"), word_tokenizer(), kv_cache_bytes=1 << 20)
    lm._hf.scheduler.runner.forward = fail
    return lm


@pytest.mark.parametrize("make", [transformer, replicas])
async def test_failed_queries_leave_no_reference_cycles(make):
    lm = make()

    async def ask(i):
        with pytest.raises(ArithmeticError):
            lm.next_token_logprobs_sync([1, i])
        with pytest.raises(ArithmeticError):
            lm.batch_next_token_logprobs_sync([[2, i], [3, i]])
        with pytest.raises(ArithmeticError):
            await lm.next_token_logprobs([4, i])
        with pytest.raises(ArithmeticError):
            await lm.batch_next_token_logprobs([[5, i], [6, i]])
        for _ in range(3):
            await asyncio.sleep(0)
        lm.clear_cache()  # the worker has let go of the last batch

    await ask(0)
    gc.collect()
    gc.disable()
    try:
        for i in range(1, 4):
            await ask(i)
        assert gc.collect() == 0
    finally:
        gc.enable()
    lm.close()
