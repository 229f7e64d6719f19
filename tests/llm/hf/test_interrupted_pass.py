"""A long pass that nobody waits for any more ends between two of its layers."""

import asyncio
import random
import threading

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend.errors import QueryDroppedError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row
from tests.tree_integrity import check_integrity

LONG = [random.Random(3).randrange(families.VOCAB) for _ in range(90)]


@pytest.fixture(params=["llama", "gpt2", "qwen3_5"])
def lm(request):
    name = request.param
    try:
        model = families.make(name)
    except KeyError:
        model = families.make(name)
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        yield lm
        check_integrity(lm._evaluator.scheduler.tree)


def check(lm, context):
    row = lm.next_token_logprobs_sync(context)
    torch.testing.assert_close(row, naive_row(lm.model, context), rtol=0, atol=5e-5)


def test_pass_interrupted_at_any_layer_corrupts_no_row(lm):
    evaluator, calls = lm._evaluator, []
    real = evaluator.check_cancelled
    try:
        evaluator.check_cancelled = lambda: calls.append(1)
        lm.next_token_logprobs_sync(LONG)
        num_layers = lm.model.config.num_hidden_layers
        assert len(calls) > num_layers
        for last in range(len(calls)):
            lm.clear_kv_cache()
            left = iter(range(last))

            def ended(left=left):
                if next(left, None) is None:
                    raise QueryDroppedError("by the test")

            evaluator.check_cancelled = ended
            with pytest.raises(QueryDroppedError, match="by the test"):
                lm.next_token_logprobs_sync(LONG)
            check_integrity(lm._evaluator.scheduler.tree)
            evaluator.check_cancelled = real
            for context in (LONG, LONG[:50], [*LONG[:50], 1], LONG):
                check(lm, context)
    finally:
        evaluator.check_cancelled = real


def test_short_pass_skips_cancellation_checks_between_layers(lm):
    evaluator, calls = lm._evaluator, []
    real = evaluator.check_cancelled
    lm.next_token_logprobs_sync(LONG)
    evaluator.check_cancelled = lambda: calls.append(1)
    try:
        lm.next_token_logprobs_sync([*LONG, 1])
        assert len(calls) <= 3
    finally:
        evaluator.check_cancelled = real


async def test_a_cancelled_await_ends_its_pass(lm):
    """It is cancelled within its first layer, and its second one is never run."""
    view = lm._hf._runner.view_with(None)
    lists = [m for m in view.module.modules() if isinstance(m, torch.nn.ModuleList)]
    ran, began, cancelled = [], threading.Event(), threading.Event()
    for layer in max(lists, key=len):
        forward = layer.forward

        def slow(*args, forward=forward, **options):
            ran.append(1)
            began.set()
            cancelled.wait(10)
            return forward(*args, **options)

        vars(layer)["forward"] = slow
        lm._hf._runner.view_with(None).check_between_layers(lambda: lm._evaluator.check_cancelled())
    task = asyncio.ensure_future(lm.next_token_logprobs(LONG))
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    await asyncio.wait([task])
    cancelled.set()
    await lm.next_token_logprobs([1])
    assert len(ran) == 1 + lm.model.config.num_hidden_layers
