"""Beam search against transformers' own."""

import asyncio
import math
import random

import pytest
import torch
from transformers import GenerationConfig as HFGenerationConfig

from genlm_backend import AsyncTransformer, MockAsyncLM
from genlm_backend.errors import EvaluationError, GenerationConfigError
from genlm_backend.generation import GenerationConfig, generate, stream
from genlm_backend.queries.row import Row
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row

MANY = list(range(40, 70))  # so that the estimates of when to end matter
SETTINGS = [
    {"num_beams": 2, "length_penalty": 1.5, "early_stopping": "never", "eos_token_id": MANY},
    {"num_beams": 3, "length_penalty": 2.0, "eos_token_id": MANY, "num_return_sequences": 3},
    {"num_beams": 4, "early_stopping": "never", "eos_token_id": MANY, "num_return_sequences": 4},
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 3, "length_penalty": -1.0, "early_stopping": True},
    {"num_beams": 5, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 4, "length_penalty": 1.5, "early_stopping": "never", "num_return_sequences": 4},
    {"num_beams": 3, "early_stopping": True, "num_return_sequences": 2},
    {"num_beams": 4, "repetition_penalty": 1.3, "min_new_tokens": 4},
    {"num_beams": 2, "no_repeat_ngram_size": 1, "num_return_sequences": 2},
]


@pytest.fixture
def lm(model):
    with AsyncTransformer(model, word_tokenizer()) as lm:
        yield lm


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
async def test_beam_texts_and_scores_equal_those_of_transformers(lm, model, settings):
    generator = random.Random(1)
    prompts = [[generator.randrange(96) for _ in range(n % 6 + 1)] for n in range(10)]
    eos = settings.get("eos_token_id", [7, 30, 31, 55, 60, 61, 62, 63])
    hf = HFGenerationConfig(max_new_tokens=14, pad_token_id=1, **{"eos_token_id": eos, **settings})
    config = GenerationConfig.from_hf(hf)

    found = await asyncio.gather(*(generate(lm, prompt, config) for prompt in prompts))
    reasons = set()
    for prompt, ours in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=hf,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert len(ours) == len(theirs.sequences) == settings.get("num_return_sequences", 1)
        for one, row, score in zip(ours, theirs.sequences, theirs.sequences_scores, strict=True):
            row = row[len(prompt) :].tolist()
            assert one.token_ids == row[: len(one.token_ids)]
            assert set(row[len(one.token_ids) :]) <= {1}
            # Sums of log-probabilities are compared, since a score can be many times as large. Each
            # of the tokens adds the rounding of a row in float32, which no two processors share.
            length = len(one.token_ids)
            scale = length ** settings.get("length_penalty", 1.0)
            assert one.score * scale == pytest.approx(float(score) * scale, abs=1e-5 * length)
            reasons.add(one.finish_reason)
            assert one.finish_reason == ("eos" if one.token_ids[-1] in eos else "length")
    assert "eos" in reasons or settings.get("length_penalty", 1) > 1 or "min_new_tokens" in settings


async def test_beam_tokens_carry_their_log_probabilities(lm, model):
    config = GenerationConfig(num_beams=3, n=2, max_new_tokens=5, logprobs=True, top_logprobs=2)
    for text in await generate(lm, [1, 2], config):
        context, total = [1, 2], 0.0
        for token in text.tokens:
            row = naive_row(model, context)
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
            assert [i for i, _ in token.top_logprobs] == row.topk(2).indices.tolist()
            context.append(token.token_id)
            total += token.logprob
        assert text.score == pytest.approx(total / len(text.tokens), abs=1e-4)


async def test_beam_search_honours_stop_words_and_batches_its_beams(lm):
    config = GenerationConfig(num_beams=4, max_new_tokens=10)
    (whole,) = await generate(lm, [5, 6], config)
    word = whole.token_ids[2:4]
    (cut,) = await generate(lm, [5, 6], config.replace(stop_words_ids=[word], n=1))
    assert cut.finish_reason in ("stop", "length")
    if cut.finish_reason == "stop":
        assert cut.token_ids[-2:] == word
    assert max(lm.statistics().batch_sizes) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 0}, "num_beams must be an integer of 1 or more"),
        ({"num_beams": 2, "do_sample": True}, "num_beams must be 1 with sampling"),
        ({"num_beams": 2, "response_format": {"type": "json_object"}}, "num_beams must be 1"),
        ({"num_beams": 2, "n": 3}, "n must be 1, or at most num_beams"),
        ({"length_penalty": 2.0}, "length_penalty must be 1.0 unless num_beams > 1"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty must be a number"),
        ({"beam_early_stopping": True}, "beam_early_stopping must be False unless"),
        ({"num_beams": 2, "beam_early_stopping": "soon"}, "one of True, False, 'never'"),
    ],
)
def test_contradictory_beam_options_raise_config_error(fields, message):
    with pytest.raises(GenerationConfigError, match=message):
        GenerationConfig(**fields)


async def test_streaming_a_beam_search_raises_config_error():
    with (
        MockAsyncLM(word_tokenizer()) as lm,
        pytest.raises(GenerationConfigError, match="num_beams must be 1 to stream"),
    ):
        await anext(stream(lm, [1], num_beams=2, max_new_tokens=3))


async def test_generation_from_nan_rows_raises_evaluation_error():
    with MockAsyncLM(word_tokenizer()) as lm:
        nothing = torch.full((len(lm.byte_vocab),), torch.nan)
        lm._evaluator.evaluate = lambda queries: [Row(nothing, math.nan) for _ in queries]
        for fields in ({}, {"num_beams": 2}, {"do_sample": True, "seed": 1}):
            with pytest.raises(EvaluationError, match=r"(?i)nan"):
                await generate(lm, [1], max_new_tokens=3, **fields)
