"""Rows under an adapter are those of the model with the adapter merged in."""

import asyncio
import copy
import importlib
import random
import shutil
import sys
import threading
from functools import partial

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from genlm_backend import AsyncTransformer
from genlm_backend.backends import loading
from genlm_backend.errors import (
    AdapterError,
    MissingExtraError,
    ModelStateError,
    UnknownAdapterError,
)
from genlm_backend.generation import Engine, generate
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.hf import adapter_kinds
from tests.llm.vllm.adapters import make_adapter
from tests.naive import naive_row

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def base():
    return families.make("llama")


@pytest.fixture
def any_peft(monkeypatch):
    """Have transformers take PEFT as it is: 5.24 asks for a release that is not out yet."""
    monkeypatch.setattr(tf.integrations.peft, "check_peft_version", lambda min_version: None)


@pytest.fixture
def peft():
    return importlib.import_module("peft")


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
            torch.testing.assert_close(row, naive_row(models[name], context), rtol=0, atol=2e-5)
    assert lm.statistics().tokens_reused > 0
    for name, model in models.items():
        row = lm.next_token_logprobs_uncached([1, 2, 3], name)
        torch.testing.assert_close(row, naive_row(model, [1, 2, 3]), rtol=0, atol=2e-5)


async def test_generation_and_engine_requests_use_named_adapter(lm, models):
    texts = await asyncio.gather(
        *(generate(lm, [3, 4], max_new_tokens=6, lora_name=name) for name in models)
    )
    for (text,), model in zip(texts, models.values(), strict=True):
        context = [3, 4]
        while len(context) < 8:
            context.append(int(naive_row(model, context).argmax()))
        assert text.token_ids == context[2:]
    with Engine() as engine:
        engine.install_model("m", lm, warm_up=False)
        engine.start_model("m")
        requests = [
            engine.start_request_ids("m", [3, 4], max_new_tokens=6, lora_name=name)
            for name in models
        ]
        assert [r.result()[0].token_ids for r in requests] == [
            (await generate(lm, [3, 4], max_new_tokens=6, lora_name=name))[0].token_ids
            for name in models
        ]


def test_adding_name_again_replaces_its_adapter(lm, models, tmp_path):
    def check(adapter):
        for context in ([1, 2, 3], [1, 2, 3, 4], [5]):
            row = lm.next_token_logprobs_sync(context, "poet")
            torch.testing.assert_close(row, naive_row(models[adapter], context), rtol=0, atol=2e-5)

    check("poet")
    lm.cache_kv([1, 2, 3], "poet")
    lm.add_new_lora(str(tmp_path / "clerk"), "poet")
    check("clerk")
    with pytest.raises(AdapterError, match=r"the adapter .* cannot be loaded"):
        lm.add_new_lora(str(tmp_path / "nowhere"), "poet")
    check("clerk")
    lm.add_new_lora(str(tmp_path / "poet"), "poet")
    check("poet")
    shutil.rmtree(tmp_path / "poet")
    models["poet"] = make_adapter(tmp_path / "poet", 3, models[None])
    lm.add_new_lora(str(tmp_path / "poet"), "poet")
    check("poet")
    assert len(lm._evaluator._runner._views) == 3  # what is replaced is freed


@pytest.mark.parametrize("is_called_by_the_loop", [True, False])
async def test_queries_before_adapter_replacement_use_old_adapter(
    lm, models, tmp_path, is_called_by_the_loop
):
    pairs = [([i, 2], name) for i in range(50) for name in models]  # of more than one batch
    tasks = [asyncio.create_task(lm.next_token_logprobs(*pair)) for pair in pairs]
    scoring = asyncio.create_task(lm.score([3, 4], [5, 6, 7, 8], "poet"))
    await asyncio.sleep(0)
    add = partial(lm.add_new_lora, str(tmp_path / "clerk"), "poet")
    add() if is_called_by_the_loop else await asyncio.to_thread(add)
    after = await lm.next_token_logprobs([1, 2], "poet")
    for (context, name), row in zip(pairs, await asyncio.gather(*tasks), strict=True):
        torch.testing.assert_close(row, naive_row(models[name], context), rtol=0, atol=2e-5)
    text = [3, 4, 5, 6, 7, 8]
    for end, score in enumerate(await scoring, 2):
        expected = naive_row(models["poet"], text[:end])[text[end]]
        torch.testing.assert_close(score, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(after, naive_row(models["clerk"], [1, 2]), rtol=0, atol=2e-5)


@pytest.mark.usefixtures("any_peft")
def test_loaded_adapter_ignores_overwritten_file(models, tmp_path):
    model = copy.deepcopy(models[None])
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        lm.add_new_lora(str(tmp_path / "poet"), "mine")
        file = "adapter_model.safetensors"
        (tmp_path / "poet" / file).write_bytes((tmp_path / "clerk" / file).read_bytes())
        model.load_adapter(str(tmp_path / "clerk"), adapter_name="owners")  # layers are made anew
        row = lm.next_token_logprobs_sync([7, 8], "mine")
        torch.testing.assert_close(row, naive_row(models["poet"], [7, 8]), rtol=0, atol=2e-5)
        lm.add_new_lora(str(tmp_path / "poet"), "mine")
        row = lm.next_token_logprobs_sync([7, 8], "mine")
        torch.testing.assert_close(row, naive_row(models["clerk"], [7, 8]), rtol=0, atol=2e-5)


def test_adapter_that_fails_to_load_changes_no_row(lm, models, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "adapter_config.json").write_text("{}")
    for path in (tmp_path / "nowhere", wrong):
        with pytest.raises(AdapterError, match=r"the adapter .* cannot be loaded"):
            lm.add_new_lora(str(path), "third")
    for name, model in models.items():
        row = lm.next_token_logprobs_sync([7, 8], name)
        torch.testing.assert_close(row, naive_row(model, [7, 8]), rtol=0, atol=2e-5)


async def put_before(lm, ask, *jobs):
    """Await what is asked while the worker is held, with jobs that it does before it."""
    is_held, gate = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        assert gate.wait(30)

    done = [asyncio.create_task(asyncio.to_thread(lm._batcher.call, hold))]
    await asyncio.to_thread(is_held.wait, 30)
    for number, job in enumerate(jobs, 1):
        done.append(asyncio.create_task(asyncio.to_thread(job)))
        while lm._batcher._worker._calls.qsize() < number:
            await asyncio.sleep(0.001)
    asked = [asyncio.create_task(one) for one in ask]
    while lm._batcher._worker._calls.qsize() <= len(jobs):
        await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(*done)
    return await asyncio.gather(*asked, return_exceptions=True)


async def test_removing_adapter_fails_only_its_pending_queries(lm, models):
    pairs = [([i, 2], name) for i in range(3) for name in models]
    asked = (lm.next_token_logprobs(*pair) for pair in pairs)
    rows = await put_before(lm, asked, lambda: lm.remove_lora("poet"))
    for (context, name), row in zip(pairs, rows, strict=True):
        if name == "poet":
            assert isinstance(row, UnknownAdapterError)
        else:
            torch.testing.assert_close(row, naive_row(models[name], context), rtol=0, atol=2e-5)


async def test_pending_queries_of_removed_name_do_not_use_its_new_adapter(lm, models, tmp_path):
    pairs = [([1, 2], name) for name in models]
    rows = await put_before(
        lm,
        [lm.next_token_logprobs(*pair) for pair in pairs],
        lambda: lm.remove_lora("poet"),
        lambda: lm.add_new_lora(str(tmp_path / "clerk"), "poet"),
    )
    for (context, name), row in zip(pairs, rows, strict=True):
        if name == "poet":
            assert isinstance(row, UnknownAdapterError)
        else:
            torch.testing.assert_close(row, naive_row(models[name], context), rtol=0, atol=2e-5)
    row = await lm.next_token_logprobs([1, 2], "poet")
    torch.testing.assert_close(row, naive_row(models["clerk"], [1, 2]), rtol=0, atol=2e-5)


async def test_scores_with_adapters_match_merged_models(lm, models):
    text = [3, 1, 4, 1, 5, 9, 2, 6]

    def check(name, start, found):
        for end, score in enumerate(found, start):
            expected = naive_row(models[name], text[:end])[text[end]]
            torch.testing.assert_close(score, expected, rtol=0, atol=2e-5)
        assert len(found) == len(text) - start

    pairs = [(start, name) for start in (1, 4) for name in models]
    for _ in range(2):
        asked = (lm.score(text[:start], text[start:], name) for start, name in pairs)
        found = await put_before(lm, asked)
        for (start, name), scores in zip(pairs, found, strict=True):
            check(name, start, scores)
    asked = (lm.score(text[:start], text[start:], name) for start, name in pairs)
    found = await put_before(lm, asked, lambda: lm.remove_lora("poet"))
    for (start, name), scores in zip(pairs, found, strict=True):
        if name == "poet":
            assert isinstance(scores, UnknownAdapterError)
        else:
            check(name, start, scores)
    with pytest.raises(UnknownAdapterError, match="'poet'"):
        await lm.score([1], [2], "poet")


async def test_error_with_one_adapter_fails_only_its_queries(lm, models, peft, tmp_path):
    def fail(module, *_):
        if any(3 in child.r.values() for child in module.modules() if hasattr(child, "lora_A")):
            raise ArithmeticError("as asked")

    # Only the third adapter has layers of rank 3, so that the pass fails while they are in place.
    wrong = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(models[None]), wrong).save_pretrained(tmp_path / "third")
    lm.add_new_lora(str(tmp_path / "third"), "third")
    lm.model.register_forward_pre_hook(fail)
    pairs = [([i, 2], name) for i in range(3) for name in (*models, "third")]
    asked = (lm.next_token_logprobs(*pair) for pair in pairs)
    rows = await asyncio.gather(*asked, return_exceptions=True)
    for (context, name), row in zip(pairs, rows, strict=True):
        if name == "third":
            assert isinstance(row, ArithmeticError)
        else:
            torch.testing.assert_close(row, naive_row(models[name], context), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(next(k for k in weights if "magnitude" in k)), "lacks"),
        (lambda weights: weights.update({"somewhere.lora_A": torch.ones(1)}), "somewhere.lora_A"),
    ],
)
def test_adapter_file_with_wrong_weights_is_refused(lm, base, tmp_path, change, message):
    adapter_kinds.save("dora", base, tmp_path / "dora")
    path = tmp_path / "dora" / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    with pytest.raises(AdapterError, match=message):
        lm.add_new_lora(str(tmp_path / "dora"), "dora")
    row = lm.next_token_logprobs_sync([7, 8])
    torch.testing.assert_close(row, naive_row(base, [7, 8]), rtol=0, atol=2e-5)


async def test_two_wrappers_of_one_model_have_separate_adapters(models, tmp_path):
    model = copy.deepcopy(models[None])
    with (
        AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as one,
        AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as other,
    ):
        for lm, name in ((one, "poet"), (other, "clerk")):
            lm.add_new_lora(str(tmp_path / name), "mine")
        for i in range(10):
            asked = [(lm, [i, 2, i], name) for lm in (one, other) for name in (None, "mine")]
            rows = await asyncio.gather(*(lm.next_token_logprobs(c, n) for lm, c, n in asked))
            for (lm, context, name), row in zip(asked, rows, strict=True):
                adapter = name and ("poet" if lm is one else "clerk")
                expected = naive_row(models[adapter], context)
                torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("any_peft")
@pytest.mark.parametrize("came_with", [None, "poet"])
def test_owner_may_switch_adapters_between_batches(models, tmp_path, came_with):
    model = copy.deepcopy(models[None])
    if came_with:
        model.load_adapter(str(tmp_path / came_with), adapter_name=came_with)
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        lm.add_new_lora(str(tmp_path / "clerk"), "mine")

        def check(owners):
            for name, adapter in ((None, came_with), ("mine", "clerk"), (None, came_with)):
                row = lm.next_token_logprobs_sync([7, 8, 9], name)
                expected = naive_row(models[adapter], [7, 8, 9])
                torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)
                row, expected = (naive_row(m, [5, 6]) for m in (model, models[owners]))
                torch.testing.assert_close(row, expected, rtol=0, atol=2e-5)

        check(came_with)
        model.load_adapter(str(tmp_path / "clerk"), adapter_name="owners")
        model.set_adapter("owners")
        check("clerk")
        model.disable_adapters()
        check(None)
        model.enable_adapters()
        check("clerk")
        lm.remove_lora("mine")
        lm.add_new_lora(str(tmp_path / "clerk"), "mine")
        check("clerk")
        model.set_adapter(came_with or "owners")
        model.delete_adapter("owners")
        check(came_with)
        if came_with:
            model.delete_adapter(came_with)
            for name in (None, "mine"):
                with pytest.raises(ModelStateError, match=r"adapter poet.* wrap the model again"):
                    lm.next_token_logprobs_sync([7, 8, 9], name)


def test_merging_adapter_by_owner_raises_model_state_error(models, peft, tmp_path):
    model = peft.PeftModel.from_pretrained(copy.deepcopy(models[None]), str(tmp_path / "poet"))
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        lm.add_new_lora(str(tmp_path / "clerk"), "mine")
        for name, adapter in ((None, "poet"), ("mine", "clerk")):
            row = lm.next_token_logprobs_sync([7, 8], name)
            torch.testing.assert_close(row, naive_row(models[adapter], [7, 8]), rtol=0, atol=2e-5)
        model.merge_adapter()
        for name in (None, "mine"):
            with pytest.raises(ModelStateError, match=r"merged adapters from .*default"):
                lm.next_token_logprobs_sync([7, 8], name)
        with (
            AsyncTransformer(model, word_tokenizer()) as other,
            pytest.raises(AdapterError, match="merged"),
        ):
            other.add_new_lora(str(tmp_path / "clerk"), "third")
        model.unmerge_adapter()
        row = lm.next_token_logprobs_sync([7, 8])
        torch.testing.assert_close(row, naive_row(models["poet"], [7, 8]), rtol=0, atol=2e-5)


@pytest.mark.usefixtures("any_peft")
@pytest.mark.parametrize("active", ["poet", "clerk", None])
def test_model_with_own_adapter_keeps_it(models, tmp_path, active):
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
            torch.testing.assert_close(row, naive_row(own, [7, 8]), rtol=0, atol=2e-5)
            lm.clear_cache()

        check()
        with pytest.raises(AdapterError, match="already has an adapter named 'poet'"):
            lm.add_new_lora(str(tmp_path / "clerk"), "poet")
        with pytest.raises(AdapterError, match=r"the adapter .* cannot be loaded"):
            lm.add_new_lora(str(tmp_path / "nowhere"), "third")
        check()
        lm.add_new_lora(str(tmp_path / "clerk"), "third")
        row = lm.next_token_logprobs_sync([7, 8], "third")
        torch.testing.assert_close(row, naive_row(models["clerk"], [7, 8]), rtol=0, atol=2e-5)
        check()
        lm.remove_lora("third")
        check()
        assert "poet" in model.peft_config


def test_missing_peft_error_names_the_extra(models, monkeypatch):
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


def test_adapter_with_nan_weights_is_refused(lm, base, tmp_path):
    adapter_kinds.save("lora", base, tmp_path / "nan")
    path = tmp_path / "nan" / "adapter_model.safetensors"
    save_file({name: weight * torch.nan for name, weight in load_file(path).items()}, path)
    with pytest.raises(AdapterError, match="its rows are NaN"):
        lm.add_new_lora(str(tmp_path / "nan"), "nan")


def test_repository_is_not_requested_if_hub_does_not_answer(lm, peft, monkeypatch):
    monkeypatch.setattr(loading, "hub_answers", lambda: False)
    monkeypatch.setattr(peft.PeftConfig, "from_pretrained", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(AdapterError, match="the hub does not answer"):
        lm.add_new_lora("someone/adapter", "new")


@pytest.mark.parametrize("way", ["cache_kv", "next_token_logprobs_uncached"])
async def test_call_queued_after_adapter_removal_raises_unknown_adapter_error(lm, way):
    held = threading.Event()
    lm._batcher.call_soon(held.wait)
    removing = asyncio.create_task(asyncio.to_thread(lm.remove_lora, "poet"))
    while lm._batcher._worker._calls.qsize() < 1:
        await asyncio.sleep(0.001)
    asking = asyncio.create_task(asyncio.to_thread(getattr(lm, way), [1, 2], "poet"))
    while lm._batcher._worker._calls.qsize() < 2:
        await asyncio.sleep(0.001)
    held.set()
    await removing
    with pytest.raises(UnknownAdapterError, match="removed"):
        await asking
