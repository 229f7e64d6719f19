"""No tensor of the library has torch's default dtype, which the whole process shares.

transformers sets it, for all threads, while it loads a model.
"""

import ast
import asyncio
import contextlib
import threading
from pathlib import Path

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend import __file__ as package
from tests.llm import families
from tests.llm.conftest import fresh_row, random_contexts, word_tokenizer

MAKERS = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
"""Functions of torch that make a tensor of the default dtype, or may."""


def without_dtype(text):
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in MAKERS:
            names = {keyword.arg for keyword in node.keywords}
            if "dtype" not in names and None not in names:  # **options may have it
                yield node.lineno


def test_every_tensor_that_is_made_says_its_dtype():
    assert not [
        f"{path}:{line}"
        for path in sorted(Path(package).parent.rglob("*.py"))
        for line in without_dtype(path.read_text())
    ]


def test_the_reader_sees_what_it_is_for():
    assert list(without_dtype("torch.zeros(3)\ntorch.ones(2, dtype=torch.bool)\nzeros(1)")) == [1]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*families.PER_TOKEN, *families.RUNNING, *families.WHOLE])
def test_rows_and_scores_do_not_depend_on_the_default_dtype(name, dtype):
    model = families.make(name)
    contexts = random_contexts(7, seed=3)
    rows = [fresh_row(model, context) for context in contexts]
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        with default_dtype(dtype):
            found = lm.batch_next_token_logprobs_sync(contexts)
            again = lm.batch_next_token_logprobs_sync([[*context, 5] for context in contexts])
            scores = lm.batch_score_sync(contexts, [[5, 6]] * len(contexts))
        for row, expected in zip(found, rows, strict=True):
            torch.testing.assert_close(row, expected, rtol=0, atol=5e-5)
        for context, row, score in zip(contexts, again, scores, strict=True):
            expected = fresh_row(model, [*context, 5])
            torch.testing.assert_close(row, expected, rtol=0, atol=5e-5)
            wanted = torch.stack([fresh_row(model, context)[5], expected[6]])
            torch.testing.assert_close(score, wanted, rtol=0, atol=5e-5)


async def test_a_model_answers_while_another_is_loaded(tmp_path):
    families.make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model, is_over = families.make("mistral-sliding"), threading.Event()
    contexts = random_contexts(20, seed=4)
    wanted = [fresh_row(model, context)[7] for context in contexts]
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
