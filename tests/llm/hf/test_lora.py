"""Rows under an adapter are those of the model with the adapter merged in."""

import asyncio
import copy
import random
import sys
import threading

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend.errors import AdapterError, MissingExtraError, UnknownAdapterError
from genlm_backend.generation import Engine, generate
from tests.llm import families
from tests.llm.conftest import fresh_row, word_tokenizer
from tests.llm.vllm.adapters import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["llama", "mistral-sliding"])
def base(request):
    return families.make(request.param)


@pytest.fixture
def models(base, tmp_path):
    """The base model, and what each adapter makes of it."""
    return {
        None: base,
        "poet": make_adapter(tmp_path / "poet", 1, base),
        "clerk": make_adapter(tmp_path / "clerk", 2, base),
    }


@pytest.fixture
def lm(models, tmp_path):
    with AsyncTransformer(copy.deepcopy(models[None]), word_tokenizer()) as lm:
        for name in ("poet", "clerk"):
            lm.add_new_lora(str(tmp_path / name), name)
        yield lm


async def test_adapters_share_batches_and_never_keys_or_values(lm, models):
    generator = random.Random(0)
    asked = [
        ([generator.randrange(96) for _ in range(generator.randint(1, 9))], name)
        for _ in range(12)
        for name in models
    ]
    first = await asyncio.gather(*(lm.next_token_logprobs(c, n) for c, n in asked))
    longer = [([*context, 5], name) for context, name in asked]
    second = await asyncio.gather(*(lm.next_token_logprobs(c, n) for c, n in longer))
    for pairs, rows in ((asked, first), (longer, second)):
        for (context, name), row in zip(pairs, rows, strict=True):
            torch.testing.assert_close(row, fresh_row(models[name], context), rtol=0, atol=2e-5)
    assert lm.statistics().tokens_reused > 0
    for name, model in models.items():
        row = lm.next_token_logprobs_uncached([1, 2, 3], name)
        torch.testing.assert_close(row, fresh_row(model, [1, 2, 3]), rtol=0, atol=2e-5)


async def test_texts_and_requests_with_an_adapter(lm, models):
    texts = await asyncio.gather(
        *(generate(lm, [3, 4], max_new_tokens=6, lora_name=name) for name in models)
    )
    for (text,), model in zip(texts, models.values(), strict=True):
        context = [3, 4]
        while len(context) < 8:
            context.append(int(fresh_row(model, context).argmax()))
        assert text.token_ids == context[2:]
    with Engine() as engine:
        engine.install_model("m", lm, warm_up=False, prefix_cache=False)
        engine.start_model("m")
        requests = [
            engine.start_request_ids("m", [3, 4], max_new_tokens=6, lora_name=name)
            for name in models
        ]
        assert [r.result()[0].token_ids for r in requests] == [
            (await generate(lm, [3, 4], max_new_tokens=6, lora_name=name))[0].token_ids
            for name in models
        ]


def test_a_name_can_be_used_again_for_another_adapter(lm, models, tmp_path):
    before = lm.next_token_logprobs_sync([1, 2, 3], "poet")
    with pytest.raises(AdapterError, match="named 'poet' already"):
        lm.add_new_lora(str(tmp_path / "clerk"), "poet")
    lm.remove_lora("poet")
    for use in (lambda: lm.next_token_logprobs_sync([1], "poet"), lambda: lm.remove_lora("poet")):
        with pytest.raises(UnknownAdapterError, match=r"'poet' is loaded \('clerk'\)"):
            use()
    lm.add_new_lora(str(tmp_path / "clerk"), "poet")
    row = lm.next_token_logprobs_sync([1, 2, 3], "poet")
    torch.testing.assert_close(row, fresh_row(models["clerk"], [1, 2, 3]), rtol=0, atol=2e-5)
    assert (row - before).abs().max() > 0.01


def test_an_adapter_that_cannot_be_loaded_leaves_everything_as_it_was(lm, models, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "adapter_config.json").write_text("{}")
    for path in (tmp_path / "nowhere", wrong):
        with pytest.raises(AdapterError, match="no adapter could be loaded from"):
            lm.add_new_lora(str(path), "third")
    for name, model in models.items():
        row = lm.next_token_logprobs_sync([7, 8], name)
        torch.testing.assert_close(row, fresh_row(model, [7, 8]), rtol=0, atol=2e-5)


async def test_an_adapter_removed_while_it_is_asked_for_fails_nobody_else(lm, models):
    is_held, gate = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        assert gate.wait(30)

    held = asyncio.create_task(asyncio.to_thread(lm._batcher.call, hold))
    await asyncio.to_thread(is_held.wait, 30)
    removing = asyncio.create_task(asyncio.to_thread(lm.remove_lora, "poet"))
    while not lm._batcher._worker._jobs.qsize():
        await asyncio.sleep(0.001)
    pairs = [([i, 2], name) for i in range(3) for name in models]
    asked = [asyncio.create_task(lm.next_token_logprobs(*pair)) for pair in pairs]
    while lm._batcher._worker._jobs.qsize() < 2:
        await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(held, removing)
    rows = await asyncio.gather(*asked, return_exceptions=True)
    for (context, name), row in zip(pairs, rows, strict=True):
        if name == "poet":
            assert isinstance(row, UnknownAdapterError)
        else:
            torch.testing.assert_close(row, fresh_row(models[name], context), rtol=0, atol=2e-5)


@pytest.mark.parametrize("active", ["poet", "clerk", None])
def test_a_model_that_came_with_an_adapter_keeps_it(models, tmp_path, active):
    model = copy.deepcopy(models[None])
    for name in ("poet", "clerk"):
        model.load_adapter(str(tmp_path / name), adapter_name=name)
    model.set_adapter(active or "poet")
    if active is None:
        model.disable_adapters()
    own = models[active]
    with AsyncTransformer(model, word_tokenizer()) as lm:

        def check():
            row = lm.next_token_logprobs_sync([7, 8])
            torch.testing.assert_close(row, fresh_row(own, [7, 8]), rtol=0, atol=2e-5)
            lm.clear_cache()

        check()
        with pytest.raises(AdapterError, match="named 'poet' already"):
            lm.add_new_lora(str(tmp_path / "clerk"), "poet")
        with pytest.raises(AdapterError, match="no adapter could be loaded"):
            lm.add_new_lora(str(tmp_path / "nowhere"), "third")
        check()
        lm.add_new_lora(str(tmp_path / "clerk"), "third")
        row = lm.next_token_logprobs_sync([7, 8], "third")
        torch.testing.assert_close(row, fresh_row(models["clerk"], [7, 8]), rtol=0, atol=2e-5)
        check()
        lm.remove_lora("third")
        check()
        assert "poet" in model.peft_config


def test_without_peft_the_extra_is_named(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "peft" else find_spec(name, *a)
    )
    with (
        AsyncTransformer(copy.deepcopy(models[None]), word_tokenizer()) as lm,
        pytest.raises(MissingExtraError, match=r"genlm-backend\[lora\]"),
    ):
        lm.add_new_lora("somewhere")
