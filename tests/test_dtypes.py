"""No tensor of the library has torch's default dtype, which the whole process shares.

transformers sets it, for all threads, while it loads a model.
"""

import asyncio
import contextlib
import threading

import pytest
import torch

from genlm_backend import AsyncTransformer
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.naive import naive_row


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", [*families.PER_TOKEN, *families.FEW_RUNNING, *families.WHOLE])
def test_rows_and_scores_do_not_depend_on_the_default_dtype(name):
    model = families.make(name)
    contexts = random_contexts(7, seed=3)
    rows = [naive_row(model, context) for context in contexts]
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        with default_dtype(torch.bfloat16):
            found = lm.batch_next_token_logprobs_sync(contexts)
            again = lm.batch_next_token_logprobs_sync([[*context, 5] for context in contexts])
            scores = lm.batch_score_sync(contexts, [[5, 6]] * len(contexts))
        for row, expected in zip(found, rows, strict=True):
            torch.testing.assert_close(row, expected, rtol=0, atol=5e-5)
        for context, row, score in zip(contexts, again, scores, strict=True):
            expected = naive_row(model, [*context, 5])
            torch.testing.assert_close(row, expected, rtol=0, atol=5e-5)
            wanted = torch.stack([naive_row(model, context)[5], expected[6]])
            torch.testing.assert_close(score, wanted, rtol=0, atol=5e-5)


async def test_scores_stay_correct_while_another_model_loads(tmp_path):
    families.make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model, is_over = families.make("mistral-sliding"), threading.Event()
    contexts = random_contexts(20, seed=4)
    wanted = [naive_row(model, context)[7] for context in contexts]
    seen = set()

    def load():
        from transformers import AutoModelForCausalLM
        from transformers.models.llama.modeling_llama import LlamaForCausalLM

        made = LlamaForCausalLM.__init__

        def noted(*args, **options):
            seen.add(torch.get_default_dtype())
            return made(*args, **options)

        LlamaForCausalLM.__init__ = noted
        try:
            while not is_over.is_set():
                AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
        finally:
            LlamaForCausalLM.__init__ = made

    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        loading = asyncio.create_task(asyncio.to_thread(load))
        try:
            while not seen or lm.statistics().num_batches < 40:
                lm.clear_cache()
                scores = await lm.batch_score(contexts, [[7]] * len(contexts))
                torch.testing.assert_close(
                    torch.cat(scores), torch.stack(wanted), rtol=0, atol=5e-5
                )
        finally:
            is_over.set()
            await loading
    assert torch.bfloat16 in seen
