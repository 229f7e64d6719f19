"""Where texts end when a caller names no token for it: where transformers ends them."""

import asyncio
import contextlib
import json

import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from genlm_backend import AsyncGLM, AsyncMlxLM, AsyncTransformer, MockAsyncLM
from genlm_backend.backends.hf.hf_loader import HFLoader
from genlm_backend.backends.mlx import present
from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint, Engine, GenerationConfig, generate, stream
from genlm_backend.llm import AsyncReplicas, AsyncVirtualLM, EvaluatorInfo, ProcessEvaluator
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.vllm.fake import FakeEngine

NUM_NEW, VOCAB = 8, families.VOCAB

# What some greedy text says is most of them, so that many texts end; and ids that no token has.
ENDS = st.one_of(
    st.integers(0, VOCAB - 1),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40, unique=True),
    st.lists(st.sampled_from([0, 1, 2, 30, 50, 70, VOCAB, 50_256]), min_size=1, unique=True),
)
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def wrapped():
    model = families.make("llama")
    with (
        AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=1 << 22) as lm,
        Engine() as engine,
    ):
        engine.install_model("m", lm, warm_up=False)
        engine.start_model("m")
        yield model, lm, engine


def expected(model, prompt, **options):
    """The new tokens of ``model.generate``, the padding behind them left off."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": VOCAB, **options}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [token_id for token_id in found[0, len(prompt) :].tolist() if token_id != VOCAB]


async def found_by_every_way(lm, engine, prompt):
    """Greedy texts of one prompt, by all that writes texts and is told nothing of their ends."""
    own = GenerationConfig.from_model(lm).replace(max_new_tokens=NUM_NEW, max_length=None)
    (generated,) = await generate(lm, prompt, max_new_tokens=NUM_NEW)
    (by_model,) = await generate(lm, prompt, own)
    request = engine.start_request_ids("m", prompt, max_new_tokens=NUM_NEW)
    with AsyncGLM(lm, generation_kwargs={"max_new_tokens": NUM_NEW, "do_sample": False}) as glm:
        row = glm.get_result(glm.submit(prompt))[0].tolist()
    return {
        "generate": generated.token_ids,
        "from_model": by_model.token_ids,
        "stream": [token.token_id async for token in stream(lm, prompt, max_new_tokens=NUM_NEW)],
        "Engine": (await request)[0].token_ids,
        "AsyncGLM": row[len(prompt) :],
    }


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ends=ENDS, prompt=PROMPTS)
def test_texts_end_at_the_same_token_as_in_transformers(wrapped, ends, prompt):
    model, lm, engine = wrapped
    model.generation_config.eos_token_id = ends
    text = expected(model, prompt)
    found = asyncio.run(found_by_every_way(lm, engine, prompt))
    assert found == dict.fromkeys(found, text)

    async def others():
        beams = await generate(lm, prompt, max_new_tokens=NUM_NEW, num_beams=2)
        sampled = await lm.sample(prompt, NUM_NEW, temperature=0)
        (batched,) = await lm.batch_sample([prompt], NUM_NEW, temperature=0)
        return beams[0].token_ids, sampled, batched

    beams, sampled, batched = asyncio.run(others())
    assert beams == expected(model, prompt, num_beams=2)
    known = {end for end in ([ends] if isinstance(ends, int) else ends) if end < VOCAB}
    without_end = text[:-1] if text[-1] in known else text
    assert sampled == batched == without_end
    assert sampled.finish_reason == ("eos" if text[-1] in known else "length")
    assert lm.eos_token_ids == known
    if known:
        allowed = Constraint.from_choice(lm, ["<3>"])
        allowed.advance(3)
        assert set(allowed.mask().nonzero().flatten().tolist()) == known


async def test_eos_of_caller_overrides_model_and_model_overrides_tokenizer():
    model = families.make("llama")
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), eos_token="<9>")
    with AsyncTransformer(model, tokenizer) as lm:
        for named, ends in (([0, 5], {0, 5}), (0, {0}), (None, {9}), ([VOCAB], {9}), ([], {9})):
            model.generation_config.eos_token_id = named
            assert lm.eos_token_ids == ends
        (text,) = await generate(lm, [1], max_new_tokens=1)
        last = text.token_ids[0]
        model.generation_config.eos_token_id = last
        (text,) = await generate(lm, [1], max_new_tokens=4, eos_token_id=(last + 1) % VOCAB)
        assert text.token_ids[0] == last
        assert len(text.token_ids) > 1
        (text,) = await generate(lm, [1], max_new_tokens=4, eos_token_id=[])
        assert text.finish_reason == "length"
        assert len(await lm.sample([1], 4, [], temperature=0)) == 4
        assert await lm.sample([1], 4, temperature=0) == []


async def test_without_any_eos_text_continues_and_constraint_raises_error():
    with MockAsyncLM(word_tokenizer()) as lm:
        assert lm.eos_token_ids == frozenset()
        assert len(await lm.sample([1], 5, seed=0)) == 5
        with pytest.raises(ConstraintError, match="no end-of-sequence token is known: pass"):
            Constraint.from_choice(lm, ["<1>"])


# -------------------------------------------------------------------- wherever the model is


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory of a model whose generation config alone names its ends; 0 is one of them."""
    path = tmp_path_factory.mktemp("model")
    model = families.make("llama")
    model.generation_config.eos_token_id = [0, 7, 50_256]
    model.save_pretrained(path)
    tf.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), eos_token="<9>").save_pretrained(
        path
    )
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == 2
    return str(path)


def of_a_process(saved):
    return AsyncTransformer.from_name(saved, process=True, kv_cache_bytes=1 << 20)


def of_replicas(saved):
    options = {"kv_cache_bytes": 1 << 20}
    loader, _ = HFLoader.of_name(saved, None, None, None, options, AsyncReplicas)
    return AsyncReplicas(loader.tokenizer(), [ProcessEvaluator(loader)])


def of_mlx(saved):
    if not present.is_present():
        pytest.skip("needs MLX")
    return AsyncMlxLM.from_name(saved)


def of_mlx_itself(saved):
    if not present.is_present():
        pytest.skip("needs MLX")
    from mlx_lm import load

    return AsyncMlxLM(*load(saved))


WHEREVER = {
    "here": AsyncTransformer.from_name,
    "in a process": of_a_process,
    "replicas": of_replicas,
    "mlx": of_mlx,
    "mock": MockAsyncLM.from_name,
    "vllm": lambda saved: AsyncVirtualLM(FakeEngine(eos_token_ids=(0, 7, 50_256))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", WHEREVER.values(), ids=WHEREVER)
def test_eos_token_ids_are_known_on_every_backend(make, saved):
    with contextlib.closing(make(saved)) as lm:
        assert lm.eos_token_ids == {0, 7}


@pytest.mark.mlx
@pytest.mark.filterwarnings("ignore")
def test_model_loaded_by_mlx_lm_keeps_its_eos_token_ids(saved):
    with contextlib.closing(of_mlx_itself(saved)) as lm:
        assert lm.eos_token_ids == {0, 7, 9}  # it takes the tokenizer's end as one more


async def test_model_without_eos_of_its_own_ends_at_tokenizers_eos():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a")
    with MockAsyncLM(tokenizer) as lm:
        assert lm.eos_token_ids == {0}
        assert {i for seed in range(9) for i in await lm.sample([1], 9, seed=seed)} == {1}


@pytest.mark.parametrize("wrong", ["abc", 5, [1.5], [True]])
def test_invalid_eos_token_ids_of_evaluator_info_raise_type_error(wrong):
    with pytest.raises(TypeError, match="eos_token_ids must be a collection of token ids"):
        EvaluatorInfo(eos_token_ids=wrong)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=15, deadline=None)
@given(ends=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), prompt=PROMPTS)
def test_mock_model_texts_end_at_its_eos_token_ids(ends, prompt):
    with MockAsyncLM(word_tokenizer(), eos_token_ids=ends) as lm, Engine() as engine:
        engine.install_model("m", lm, warm_up=False)
        engine.start_model("m")
        text = []
        while len(text) < NUM_NEW and not set(text) & set(ends):
            text.append(int(lm.next_token_logprobs_sync([*prompt, *text]).argmax()))
        found = asyncio.run(found_by_every_way(lm, engine, prompt))
    assert found == dict.fromkeys(found, text)
