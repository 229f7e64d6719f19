"""Queries that fail leave nothing behind, on whatever answers them."""

import asyncio
import gc

import pytest

from genlm_backend import AsyncReplicas, AsyncTransformer, MockAsyncLM
from genlm_backend.llm import StatelessEvaluator
from tests.llm import families
from tests.llm.conftest import word_tokenizer


class Failing(StatelessEvaluator):
    """Another evaluator, which fails where it would answer."""

    def __init__(self):
        super().__init__()
        self.open = MockAsyncLM(word_tokenizer())._evaluator.open

    def evaluate(self, queries):
        fail()


def fail(*arguments):
    raise ArithmeticError("by the test")


def replicas():
    return AsyncReplicas(word_tokenizer(), [Failing(), Failing()])


def mock():
    lm = MockAsyncLM(word_tokenizer())
    lm._evaluator.evaluate = fail
    return lm


def transformer():
    lm = AsyncTransformer(families.make("llama"), word_tokenizer(), kv_cache_bytes=1 << 20)
    lm._hf.scheduler.runner.forward = fail
    return lm


@pytest.mark.parametrize("make", [mock, transformer, replicas])
async def test_a_failure_leaves_nothing_to_the_garbage_collector(make):
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
        lm.clear_cache()  # whoever answers has let go of the last batch

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
