"""What is read off, scored, drawn, moved and adapted on a CUDA device, against the processor."""

import asyncio
import copy
import random

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from genlm_backend import AsyncTransformer
from genlm_backend.backends.hf import cuda_graph_runner
from genlm_backend.generation import generate
from genlm_backend.queries.query import RowQuery
from genlm_backend.readouts.sample_readout import SampleReadout, SamplingFilter
from genlm_backend.readouts.token_readouts import Chosen, Entropy, Masses, Top
from tests.llm import families
from tests.llm.conftest import random_contexts, word_tokenizer
from tests.llm.hf.pictured import MANY, family, plain_row, prompt_of
from tests.llm.vllm.adapters import make_adapter
from tests.naive import naive_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

SIZE = 5000


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """Convolutions in float32, and not in the 19 bits that torch takes of it there."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def random_rows(count=200, seed=0):
    random_numbers = np.random.default_rng(seed).normal(0, 3, (count, SIZE))
    return torch.from_numpy(random_numbers).log_softmax(-1).float()


@pytest.mark.parametrize("kind", ["top", "chosen", "entropy", "masses"])
def test_readouts_of_device_rows_match_cpu(kind):
    rows, query = random_rows(), RowQuery([1])
    rows[3, 10:20] = rows[3].max()  # of equal ones the first
    rows[4, 5:] = -torch.inf
    generator = np.random.default_rng(0)
    groups = tuple(np.packbits(generator.random(SIZE) < p).tobytes() for p in (0, 0.01, 0.9))
    readouts = {
        "top": [Top(query, 1 + i % 30) for i in range(len(rows))],
        "chosen": [Chosen(query, tuple(range(i))) for i in range(len(rows))],
        "entropy": [Entropy(query)] * len(rows),
        "masses": [Masses(query, groups[: 1 + i % 3]) for i in range(len(rows))],
    }[kind]
    of_kind = type(readouts[0]).of_rows
    on_device, expected = of_kind(readouts, rows.cuda()), of_kind(readouts, rows)
    for found, own in zip(on_device, expected, strict=True):
        if kind == "top":
            assert found.token_ids.tolist() == own.token_ids.tolist()
            assert torch.equal(found.logprobs, own.logprobs)
            assert found.log_rest == pytest.approx(own.log_rest, abs=1e-5)
        elif kind == "entropy":
            assert found == pytest.approx(own, abs=1e-6)
        else:
            torch.testing.assert_close(found, own, rtol=0, atol=1e-6 * (kind == "masses"))


def check_draws(drawings, rows, most_moved, near):
    """Draws on the device are the processor's, but for some that rounding may move."""
    found, expected = (
        SampleReadout.of_rows(drawings, rows.cuda()),
        SampleReadout.of_rows(drawings, rows),
    )
    pairs = [(one, other) for (one,), (other,) in zip(found, expected, strict=True)]
    same = [(one, other) for one, other in pairs if one.token_id == other.token_id]
    assert len(same) >= len(pairs) - most_moved
    for one, other in same:
        assert one == pytest.approx(other, abs=near)


def test_draws_with_sampling_filters_match_cpu():
    rows, generator = random_rows(), np.random.default_rng(1)
    drawings = []
    for _ in rows:
        mask = np.packbits(generator.random(SIZE) < 0.5).tobytes()
        cuts = SamplingFilter(
            int(generator.integers(1, 50)) if generator.random() < 0.5 else 0,
            float(generator.random()) if generator.random() < 0.5 else 1.0,
            float(generator.random() / 10) if generator.random() < 0.5 else 0.0,
        )
        own = mask if generator.random() < 0.5 else None
        drawings.append(SampleReadout(RowQuery([1]), 0.8, (generator.random(),), own, cuts=cuts))
    check_draws(drawings, rows, 3, 1e-4)


def test_draws_with_masks_and_temperatures_match_cpu():
    rows, generator = random_rows(), np.random.default_rng(0)
    masks = [np.packbits(generator.random(SIZE) < 0.5).tobytes() for _ in range(100)]
    drawings = [
        SampleReadout(RowQuery([1]), float(temperature), (generator.random(),), mask)
        for temperature, mask in zip(
            generator.choice([0, 0.7, 1], 200), [*masks, *[None] * 100], strict=True
        )
    ]
    check_draws(drawings, rows, 2, 1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_scores_entropies_and_ranks_match_cpu(name):
    model = families.make(name)
    texts = random_contexts(20, seed=2, max_length=40)
    options = {"entropy": True, "rank": True, "top": 5}
    with (
        AsyncTransformer(copy.deepcopy(model).cuda(), word_tokenizer()) as lm,
        AsyncTransformer(model, word_tokenizer()) as plain,
    ):
        found = lm.batch_score_with_sync([[1, 2]] * 20, texts, **options)
        expected = plain.batch_score_with_sync([[1, 2]] * 20, texts, **options)
    for own, other in zip(found, expected, strict=True):
        assert own.logprobs.device.type == "cpu"
        torch.testing.assert_close(own.logprobs, other.logprobs, rtol=0, atol=2e-4)
        torch.testing.assert_close(own.entropies, other.entropies, rtol=0, atol=2e-3)
        assert own.ranks.tolist() == other.ranks.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_texts_match_model_and_seeded_draws_repeat(dtype):
    model = families.make("llama").to("cuda", dtype)
    prompts = random_contexts(8, seed=3, max_length=30)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        found = asyncio.run(
            lm.batch_sample(prompts, max_tokens=20, eos_token_ids=[], temperature=0)
        )
        text = asyncio.run(
            generate(lm, prompts[0], max_new_tokens=20, min_new_tokens=20, temperature=0)
        )
        drawn = [
            asyncio.run(lm.batch_sample(prompts, 20, [], seed=5, temperature=1)) for _ in range(2)
        ]
    assert drawn[0] == drawn[1]
    assert len(text[0].token_ids) == 20
    if dtype is torch.float32:
        for prompt, own in zip(prompts, found, strict=True):
            ids = torch.tensor([prompt], device="cuda")
            whole = model.generate(
                ids, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=-1
            )
            assert list(own) == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", families.RUNNING)
def test_rows_of_recurrent_models_match_cpu_model(name):
    """Trees of contexts, with ample room, with few states, and with some on the host."""
    try:
        model, generator = families.make(name), random.Random(0)
    except (ValueError, StrictDataclassError) as error:
        pytest.skip(f"of this version of transformers: {error}")
    prompt = [generator.randrange(1, families.VOCAB) for _ in range(20)]
    contexts = [[*prompt, generator.randrange(1, families.VOCAB)] for _ in range(6)]
    steps = []
    for _ in range(4):
        contexts = [
            [*generator.choice(contexts), generator.randrange(families.VOCAB)] for _ in range(6)
        ]
        steps.append(contexts)
    expected = [torch.stack([naive_row(model, context) for context in one]) for one in steps]
    on_device = copy.deepcopy(model).cuda()
    with AsyncTransformer(on_device, word_tokenizer(), row_cache_bytes=0) as lm:
        per_state = lm._evaluator.scheduler.cache.state_pool.layout.bytes_per_state
    few = {"kv_cache_bytes": 1 << 20, "state_cache_bytes": 6 * per_state}
    for options in ({}, few, {**few, "host_cache_bytes": 1 << 22}) if per_state else ({},):
        with AsyncTransformer(on_device, word_tokenizer(), row_cache_bytes=0, **options) as lm:
            for one, rows in zip(steps, expected, strict=True):
                found = lm.batch_next_token_logprobs_sync(one)
                torch.testing.assert_close(found, rows, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_after_host_round_trip_match_cpu_model(dtype):
    model, generator = families.make("llama"), random.Random(0)
    prompts = [[generator.randrange(families.VOCAB) for _ in range(30)] for _ in range(6)]
    expected = torch.stack([naive_row(model, prompt) for prompt in prompts])
    own = model.to(dtype)
    rounded = torch.stack([naive_row(own, prompt) for prompt in prompts])
    atol = 2e-4 + 2 * float((rounded - expected).abs().max())
    own = own.cuda()
    per_slot = 2 * 2 * 2 * 8 * torch.finfo(dtype).bits // 8
    options = {"kv_cache_bytes": 71 * per_slot, "host_cache_bytes": 400 * per_slot}
    with AsyncTransformer(own, word_tokenizer(), row_cache_bytes=0, **options) as lm:
        for _ in range(4):
            rows = torch.stack([lm.next_token_logprobs_sync(prompt) for prompt in prompts])
            torch.testing.assert_close(rows, expected, rtol=0, atol=atol)
        assert lm.statistics().num_tokens_from_host > 200


@pytest.mark.parametrize("kept", ["float16", "bfloat16", "int8"])
async def test_rows_with_kv_cache_dtype_match_cpu(kept):
    model = families.make("llama")
    contexts = random_contexts(12, max_length=30)
    options = {"kv_cache_dtype": kept, "kv_cache_bytes": 1 << 20, "row_cache_bytes": 0}
    with (
        AsyncTransformer(copy.deepcopy(model).cuda(), word_tokenizer(), **options) as lm,
        AsyncTransformer(model, word_tokenizer(), **options) as plain,
    ):
        for _ in range(2):
            found = await lm.batch_next_token_logprobs(contexts)
            expected = await plain.batch_next_token_logprobs(contexts)
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("most", [1, 64])
def test_captured_steps_with_adapters_match_adapted_models(tmp_path, monkeypatch, most):
    """Adapters whose captured passes make way for each other's."""
    pytest.importorskip("peft")
    monkeypatch.setattr(cuda_graph_runner, "MAX_GRAPHS", most)
    base, generator = families.make("llama"), random.Random(0)
    models = {None: base}
    for seed, name in enumerate(["poet", "clerk"]):
        models[name] = make_adapter(tmp_path / name, seed, base)
    own = copy.deepcopy(base).to("cuda", torch.bfloat16)
    rounded = {name: copy.deepcopy(each).to(torch.bfloat16) for name, each in models.items()}
    with AsyncTransformer(own, word_tokenizer(), row_cache_bytes=0) as lm:
        for name in ("poet", "clerk"):
            lm.add_new_lora(str(tmp_path / name), name)
        contexts = [[generator.randrange(families.VOCAB) for _ in range(9)] for _ in range(4)]
        for _ in range(6):
            contexts = [[*context, generator.randrange(families.VOCAB)] for context in contexts]
            for name, model in models.items():
                found = lm.batch_next_token_logprobs_sync(contexts, name)
                expected = torch.stack([naive_row(model, context) for context in contexts])
                noise = torch.stack([naive_row(rounded[name], context) for context in contexts])
                noise = (noise.float() - expected).square().mean().sqrt()
                assert (found - expected).square().mean().sqrt() < 3 * noise


def test_saved_prefix_is_loaded_and_reused(tmp_path):
    model, prompt = families.make("llama"), [5] * 40
    expected = naive_row(model, [*prompt, 7])
    own = model.cuda()
    with AsyncTransformer(own, word_tokenizer()) as lm:
        lm.next_token_logprobs_sync(prompt)
        lm.save_prefix(prompt, tmp_path / "prefix")
    with AsyncTransformer(own, word_tokenizer()) as lm:
        lm.load_prefix(tmp_path / "prefix")
        before = lm.statistics().tokens_computed
        row = lm.next_token_logprobs_sync([*prompt, 7])
        assert lm.statistics().tokens_computed - before <= 2
        torch.testing.assert_close(row, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MANY)
def test_picture_contexts_match_plain_model(name):
    model, processor = family(name)
    text, images = prompt_of(name, [1])
    own = copy.deepcopy(model).cuda()
    with AsyncTransformer(
        own, processor.tokenizer, processor=processor, row_cache_bytes=0, self_check=False
    ) as lm:
        context = lm.context(text, images=images)
        for more in ([], [7], [7, 8], [7, 8, 9]):
            row = lm.next_token_logprobs_sync(context + more)
            expected = plain_row(name, text, images, more)
            torch.testing.assert_close(row, expected, rtol=0, atol=2e-3)


def test_cancelled_long_pass_leaves_next_row_intact():
    """A pass ends between layers, and what others ask comes next."""
    model = families.make("llama").cuda()

    async def ask(lm):
        waiting = asyncio.create_task(lm.next_token_logprobs([n % 90 for n in range(200)]))
        await asyncio.sleep(0.001)
        waiting.cancel()
        return await lm.next_token_logprobs([1, 2, 3])

    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0) as lm:
        expected = lm.next_token_logprobs_sync([1, 2, 3])
        for _ in range(20):
            torch.testing.assert_close(asyncio.run(ask(lm)), expected, rtol=0, atol=1e-4)
