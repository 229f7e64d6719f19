"""Texts against transformers' own generate, and against what the model alone says."""

import asyncio
import math
import random
import threading

import pytest
import torch
import transformers

from genlm_backend import AsyncTransformer, MockAsyncLM, load_model_by_name
from genlm_backend.errors import ContextError, GenerationConfigError
from genlm_backend.generation import GenerationConfig, generate, generate_sync, stream
from genlm_backend.generation.text_sequence import make_processors
from genlm_backend.queries.query import NO_QUERY
from genlm_backend.readouts.sample_readout import SampleReadout, SamplingFilter
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row

SETTINGS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1, "repetition_penalty": 1.1},
    {"min_length": 14},
    {"bad_words_ids": [[n] for n in range(0, 96, 2)] + [[1, 3], [5, 7]]},
    {"min_new_tokens": 9, "no_repeat_ngram_size": 3},
]


@pytest.fixture
def lm(model):
    with AsyncTransformer(model, word_tokenizer()) as lm:
        yield lm


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
async def test_greedy_texts_are_those_of_transformers(lm, model, settings):
    generator = random.Random(0)
    prompts = [[generator.randrange(96) for _ in range(n % 9 + 1)] for n in range(12)]
    eos = [7, 30, 31, 55]
    config = GenerationConfig(max_new_tokens=16, eos_token_id=eos, **settings)
    found = await asyncio.gather(*(generate(lm, prompt, config) for prompt in prompts))
    for prompt, (ours,) in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=eos,
            pad_token_id=0,
            **settings,
        )[0, len(prompt) :].tolist()
        assert ours.token_ids == theirs
        assert ours.finish_reason == ("eos" if theirs[-1] in eos else "length")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(12))
def test_sampling_distributions_equal_those_of_transformers(model, seed):
    generator = random.Random(seed)
    fields = {
        "temperature": generator.choice([0.5, 1.0, 1.7]),
        "top_k": generator.choice([0, 3, 20]),
        "top_p": generator.choice([0.3, 0.9, 1.0]),
        "min_p": generator.choice([0.0, 0.1]),
        "repetition_penalty": generator.choice([1.0, 1.4]),
        "no_repeat_ngram_size": generator.choice([0, 2]),
        "min_length": generator.choice([0, 12]),
        "bad_words_ids": generator.choice([None, [[3], [4, 9], [5]]]),
    }
    config = GenerationConfig(
        do_sample=True, **{name: value for name, value in fields.items() if value is not None}
    )
    hf = transformers.GenerationConfig(do_sample=True, eos_token_id=[5], **fields)
    ids = torch.tensor([[generator.randrange(96) for _ in range(9)]])
    model._prepare_special_tokens(hf, device="cpu")
    theirs = model._get_logits_processor(hf, input_ids_seq_length=4, device="cpu")
    logits = torch.randn(1, 96, generator=torch.Generator().manual_seed(seed)) * 3
    ours = make_processors(config, 4, [5])(ids, logits.clone())
    check_drawn(config, ours[0], theirs(ids, logits.clone())[0].softmax(-1))


def check_drawn(config, logits, expected, num_draws=1000):
    """Compare draws by as many random numbers, evenly spread, with the probabilities of tokens."""
    bounds = SamplingFilter(config.top_k or 0, config.top_p or 1.0, config.min_p or 0.0)
    row, found = logits.log_softmax(-1), {}
    for i in range(num_draws):
        readout = SampleReadout(NO_QUERY, config.temperature, (i / num_draws,), cuts=bounds)
        (draw,) = readout.of_logprobs(row)
        found[draw.token_id] = math.exp(draw.log_proposal)
    ids = list(found)
    torch.testing.assert_close(torch.tensor([*found.values()]), expected[ids], rtol=1e-5, atol=1e-7)
    assert set(ids) >= set((expected > 1.01 / num_draws).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0, float("inf")])
async def test_equal_seeds_draw_equal_tokens_in_generate_and_sample(temperature):
    with MockAsyncLM(word_tokenizer()) as lm:
        for seed in range(5):
            fields = {"temperature": temperature, "seed": seed, "max_new_tokens": 12}
            config = GenerationConfig(do_sample=True, eos_token_id=(), **fields)
            (alone,) = await generate(lm, [1, 2], config)
            (cut,) = await generate(lm, [1, 2], config, top_k=len(lm.byte_vocab))
            sampled = await lm.sample([1, 2], 12, [], temperature, seed)
            assert alone.token_ids == cut.token_ids == list(sampled)


async def test_temperature_alone_enables_sampling_and_zero_is_greedy(lm):
    drawn = await generate(lm, [1, 2], max_new_tokens=12, temperature=0.9, seed=3)
    meant = await generate(lm, [1, 2], max_new_tokens=12, temperature=0.9, seed=3, do_sample=True)
    greedy = await generate(lm, [1, 2], max_new_tokens=12)
    zero = await generate(lm, [1, 2], max_new_tokens=12, temperature=0, top_p=0.5)
    assert drawn[0].token_ids == meant[0].token_ids != greedy[0].token_ids
    assert zero[0].token_ids == greedy[0].token_ids
    assert repr(greedy[0]).startswith("Generation(")
    assert len(repr(greedy[0])) < len(greedy[0].text) + 80


async def test_generate_sync_equals_generate_inside_a_running_loop(lm):
    """Inside of a running one, as in a notebook."""
    config = GenerationConfig(max_new_tokens=6, do_sample=True, seed=2, n=2)
    expected = await generate(lm, [1, 2], config)
    found = generate_sync(lm, [1, 2], config)
    assert [own.token_ids for own in found] == [own.token_ids for own in expected]
    assert generate_sync(lm, [1, 2], max_new_tokens=2)[0].finish_reason == "length"
    with pytest.raises(GenerationConfigError, match="max_new_token"):
        generate_sync(lm, [1, 2], max_new_token=2)
    assert not [each for each in threading.enumerate() if each.name == "genlm-generate"]


def test_penalties_of_presence_and_frequency_count_generated_tokens_only():
    config = GenerationConfig(presence_penalty=0.5, frequency_penalty=0.25)
    ids = torch.tensor([[1, 2, 3, 3, 4]])
    found = make_processors(config, 2, [])(ids, torch.zeros(1, 6))
    assert found.tolist() == [[0, 0, 0, -1.0, -0.75, 0]]
    assert make_processors(config, 5, [])(ids, torch.zeros(1, 6)).tolist() == [[0] * 6]
    config = GenerationConfig(repetition_penalty=2.0, suppress_repetition_in_generation=True)
    found = make_processors(config, 4, [])(ids, torch.ones(1, 6))
    assert found.tolist() == [[1, 1, 1, 1, 0.5, 1]]


async def test_seeded_samples_are_reproducible_in_a_crowd_and_distinct(lm):
    config = GenerationConfig(do_sample=True, seed=3, n=4, max_new_tokens=12)
    alone = await generate(lm, [1, 2], config)
    crowd = [generate(lm, [i], config.replace(seed=i)) for i in range(9)]
    beside, *_ = await asyncio.gather(generate(lm, [1, 2], config), *crowd)
    assert [g.token_ids for g in alone] == [g.token_ids for g in beside]
    assert len({tuple(g.token_ids) for g in alone}) == 4
    before = lm.statistics().tokens_computed
    await generate(lm, list(range(40)), config)
    assert lm.statistics().tokens_computed - before <= 40 + 4 * 11  # the prompt once


async def test_logprobs_are_the_models_own_without_penalties(lm, model):
    config = GenerationConfig(
        max_new_tokens=5, logprobs=True, top_logprobs=3, repetition_penalty=1.5
    )
    (generation,) = await generate(lm, [1, 2, 3], config)
    context = [1, 2, 3]
    for token in generation.tokens:
        row = naive_row(model, context)
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert [i for i, _ in token.top_logprobs] == row.topk(3).indices.tolist()
        assert dict(token.top_logprobs)[int(row.argmax())] == pytest.approx(
            float(row.max()), abs=1e-4
        )
        context.append(token.token_id)


async def test_text_ends_at_stop_words_eos_token_or_max_length(lm, model):
    (whole,) = await generate(lm, [1, 2], GenerationConfig(max_new_tokens=12))
    word = whole.token_ids[3:5]
    (cut,) = await generate(lm, [1, 2], GenerationConfig(max_new_tokens=12, stop_words_ids=[word]))
    end = next(n for n in range(2, 13) if whole.token_ids[n - 2 : n] == word)
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:end], "stop")
    eos = whole.token_ids[4]
    (ended,) = await generate(lm, [1, 2], GenerationConfig(max_new_tokens=12, eos_token_id=eos))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(eos) + 1]
    assert ended.finish_reason == "eos"
    (on,) = await generate(
        lm, [1, 2], GenerationConfig(max_new_tokens=12, eos_token_id=eos, early_stopping=False)
    )
    assert on.token_ids == whole.token_ids
    (short,) = await generate(lm, [1, 2], GenerationConfig(max_length=7))
    assert short.token_ids == whole.token_ids[:5]


@pytest.mark.parametrize(
    ("prompt", "fields", "kind", "message"),
    [
        ([], {}, ContextError, "empty"),
        ([1, 99], {}, ContextError, "token id 99"),
        ([1.5], {}, TypeError, "must be integers"),
        ([1] * 5, {"max_length": 5}, ContextError, "no room"),
        ([1], {"stop_words_ids": [[3], [96]]}, GenerationConfigError, "stop_words_ids has 96"),
        ([1], {"eos_token_id": 96}, GenerationConfigError, "eos_token_id has 96"),
        ([1], {"lora_name": "poet"}, ValueError, "poet"),
        ([1], {"response_format": {"type": "xml"}}, ValueError, "response_format"),
    ],
)
async def test_invalid_call_raises_and_leaves_others_intact(lm, prompt, fields, kind, message):
    good = asyncio.create_task(generate(lm, [1, 2], GenerationConfig(max_new_tokens=8)))
    with pytest.raises(kind, match=message):
        await generate(lm, prompt, GenerationConfig(**{"max_new_tokens": 3, **fields}))
    assert len((await good)[0].token_ids) == 8


# -------------------------------------------------------------------- on the real model


@pytest.fixture(scope="module")
def smollm2():
    with load_model_by_name("smollm2", backend="hf") as lm:
        yield lm


@pytest.mark.real
async def test_streamed_pieces_join_to_the_generated_text(smollm2):
    config = GenerationConfig(max_new_tokens=24)
    prompt = "List three emoji of animals: 🐶"
    pieces = [token.text async for token in stream(smollm2, prompt, config)]
    (whole,) = await generate(smollm2, prompt, config)
    assert "".join(pieces) == whole.text
    chat = [{"role": "user", "content": "Name one colour."}]
    ids = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    (answer,) = await generate(smollm2, chat, max_new_tokens=5)
    assert answer == (await generate(smollm2, ids, max_new_tokens=5))[0]
    assert [token async for token in stream(smollm2, chat, max_new_tokens=5)] == answer.tokens
    ids = [i for i in whole.token_ids if i not in smollm2.special_ids]
    expected = b"".join(smollm2.byte_vocab[i].byte_string for i in ids).decode(errors="replace")
    assert whole.text == expected
    with pytest.raises(GenerationConfigError, match="n must be 1 to stream"):
        await anext(stream(smollm2, prompt, config.replace(do_sample=True, n=2)))


@pytest.mark.real
async def test_stop_strings_cut_across_tokens(smollm2):
    (whole,) = await generate(
        smollm2, "The capital of France is", GenerationConfig(max_new_tokens=20)
    )
    for stop in (whole.text[6:9], whole.text[-4:], whole.text[:2]):
        config = GenerationConfig(max_new_tokens=20, stop=["never there", stop])
        (cut,) = await generate(smollm2, "The capital of France is", config)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason == "stop"


@pytest.mark.real
async def test_response_format_gives_valid_json_or_ends_by_length(smollm2):
    import json

    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": schema}
    config = GenerationConfig(
        do_sample=True, n=4, seed=0, max_new_tokens=60, response_format=response_format
    )
    for generation in await generate(smollm2, "A city as JSON: ", config):
        if generation.finish_reason == "length":
            continue
        assert "city" in json.loads(generation.text)
    config = config.replace(max_new_tokens=2)
    assert {g.finish_reason for g in await generate(smollm2, "JSON: ", config)} == {"length"}


@pytest.mark.real
def test_from_model_takes_the_models_eos_token_id(smollm2):
    config = GenerationConfig.from_model(smollm2)
    assert config.eos_token_id == smollm2.tokenizer.eos_token_id


REAL_SETTINGS = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 8},
    {"num_beams": 3},
    {"num_beams": 4, "length_penalty": 0.5, "early_stopping": True, "num_return_sequences": 2},
    {"num_beams": 2, "repetition_penalty": 1.2, "early_stopping": "never"},
]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
async def test_sixty_texts_of_smollm2_equal_those_of_transformers(smollm2):
    """Ten prompts with each of six settings, all under way at the same time."""
    text = (
        "The sun was low over the harbour when the last boat came in, and nobody spoke of it. " * 3
    )
    ids = smollm2.tokenizer.encode(text)
    jobs = [
        (ids[3 * i + k : 3 * i + k + 3 + i], REAL_SETTINGS[k])
        for i in range(10)
        for k in range(len(REAL_SETTINGS))
    ]
    model = smollm2.model

    def config_of(settings):
        hf = transformers.GenerationConfig(
            max_new_tokens=10, eos_token_id=[2, 30, 198], pad_token_id=1, **settings
        )
        return hf, GenerationConfig.from_hf(hf)

    found = await asyncio.gather(
        *(generate(smollm2, prompt, config_of(settings)[1]) for prompt, settings in jobs)
    )
    for (prompt, settings), ours in zip(jobs, found, strict=True):
        tensor = torch.tensor([prompt])
        theirs = model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            generation_config=config_of(settings)[0],
        )[:, len(prompt) :].tolist()
        for one, row in zip(ours, theirs, strict=True):
            assert one.token_ids == row[: len(one.token_ids)]
            assert set(row[len(one.token_ids) :]) <= {1}
