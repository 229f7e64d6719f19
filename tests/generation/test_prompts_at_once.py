"""Several prompts at once; a length that nobody has named; names of fields as types have them."""

import dataclasses
import warnings

import pytest

from genlm_backend import AsyncTransformer, Constraint, MockAsyncLM
from genlm_backend.errors import (
    ContextError,
    ContextTypeError,
    GenerationConfigError,
    OptionTypeError,
)
from genlm_backend.generation import GenerationConfig, generate, generate_sync, stream
from genlm_backend.generation.config import GenerationFields
from genlm_backend.runtime import progress
from tests.generation import byte_model
from tests.llm.conftest import word_tokenizer

PROMPTS = [[1, 2, 3], [4], [1, 2], [1, 2]]


@pytest.fixture
def lm(model):
    with AsyncTransformer(model, word_tokenizer()) as lm:
        yield lm


async def test_batch_of_prompts_equals_each_generated_alone(lm):
    fields = {"max_new_tokens": 7, "stop_words_ids": [[9]]}
    found = await generate(lm, PROMPTS, **fields)
    for prompt, texts in zip(PROMPTS, found, strict=True):
        (alone,) = await generate(lm, prompt, **fields)
        assert [text.token_ids for text in texts] == [alone.token_ids]
    assert found == generate_sync(lm, tuple(PROMPTS), **fields)
    assert await generate(lm, [lm.context([1, 2])], **fields) == [found[2]]
    beams = await generate(lm, PROMPTS, num_beams=3, n=2, max_new_tokens=4)
    for prompt, texts in zip(PROMPTS, beams, strict=True):
        alone = await generate(lm, prompt, num_beams=3, n=2, max_new_tokens=4)
        assert [text.token_ids for text in texts] == [text.token_ids for text in alone]


async def test_each_text_has_a_random_stream_of_its_own(lm):
    fields = {"max_new_tokens": 8, "temperature": 1.0, "seed": 5, "eos_token_id": ()}
    many = await generate(lm, [[1, 2]] * 3, n=2, **fields)
    alone = await generate(lm, [1, 2], n=6, **fields)
    assert [text.token_ids for texts in many for text in texts] == [t.token_ids for t in alone]
    assert len({tuple(text.token_ids) for text in alone}) == 6
    assert [[token.index for token in text.tokens[:1]] for text in many[1]] == [[0], [1]]


async def test_list_of_text_prompts_honours_the_response_format():
    with byte_model.make() as lm:
        both = await generate(lm, ["ab", "c"], max_new_tokens=5)
        assert [len(texts[0].token_ids) for texts in both] == [5, 5]
        schema = {"type": "json_schema", "json_schema": {"enum": [1, 22]}}
        texts = await generate(lm, ["ab", "c"], response_format=schema, max_new_tokens=9)
        assert {text.text for (text,) in texts} <= {"1", "22"}


@pytest.mark.parametrize(
    ("prompts", "error", "said"),
    [
        ([[1], []], ContextError, r"prompt\[1\]: token_ids is empty"),
        ([[1], 3], ContextTypeError, r"prompt\[1\]: a prompt must be a text"),
        ([[1], [10_000]], ContextError, r"prompt\[1\]: token id 10000"),
        ([], ContextError, "^prompt is empty: .* one prompt"),
        ((), ContextError, "^prompt is empty: .* one prompt"),
    ],
    ids=str,
)
async def test_invalid_prompt_raises_and_nothing_is_evaluated(lm, prompts, error, said):
    with pytest.raises(error, match=said):
        await generate(lm, prompts, max_new_tokens=2)
    with pytest.raises(OptionTypeError, match="progress"):
        await generate(lm, [1], progress=1, max_new_tokens=2)
    assert lm.statistics().num_awaits == 0


async def test_progress_bar_counts_the_texts(lm, monkeypatch, capsys):
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    await generate(lm, PROMPTS, n=2, temperature=1.0, max_new_tokens=2, progress=True)
    await generate(lm, PROMPTS, n=3, num_beams=3, max_new_tokens=2, progress=True)
    said = capsys.readouterr().err
    assert "8/8" in said
    assert "12/12" in said
    await generate(lm, PROMPTS, max_new_tokens=2)
    assert capsys.readouterr().err == ""


async def test_default_length_is_twenty_and_warns_of_cut_texts():
    with MockAsyncLM(word_tokenizer()) as lm:
        with pytest.warns(UserWarning, match="the text was cut off after 20 tokens") as told:
            (text,) = await generate(lm, [1])
        assert len(text.token_ids) == 20
        assert told[0].filename == __file__
        with pytest.warns(UserWarning, match="2 of 2 texts were cut off") as told:
            assert generate_sync(lm, [[1], [2]], eos_token_id=())
        assert told[0].filename == __file__
        with pytest.warns(UserWarning, match="the text was cut off") as told:
            assert len([token async for token in stream(lm, [1])]) == 20
        assert told[0].filename == __file__


async def test_no_warning_if_text_ends_or_its_length_is_given():
    with MockAsyncLM(word_tokenizer()) as lm, warnings.catch_warnings():
        warnings.simplefilter("error")
        ends = range(lm.contexts.vocab_size)
        assert (await generate(lm, [1], eos_token_id=ends))[0].finish_reason == "eos"
        for named in ({"max_new_tokens": 30}, {"max_length": 31}):
            (text,) = await generate(lm, [1], GenerationConfig(**named))
            assert len(text.token_ids) == 30
        with pytest.raises(GenerationConfigError, match="min_new_tokens must be at most"):
            await generate(lm, [1], min_new_tokens=21)


async def test_response_format_without_max_new_tokens_raises_config_error():
    with byte_model.make() as lm:
        long = "a" * 60
        config = GenerationConfig(response_format={"type": "choice", "choice": [long]})
        (text,) = await generate(lm, "x", config, max_new_tokens=100)
        assert text.text == long
        with pytest.raises(
            GenerationConfigError, match="max_new_tokens or max_length must be given"
        ):
            await generate(lm, "x", config)  # of a model that has no maximum
        assert Constraint.from_choice(lm, [long]) is not None


def test_generation_fields_match_the_config_dataclass():
    fields = {field.name: field.type for field in dataclasses.fields(GenerationConfig)}
    assert {n: r.__forward_arg__ for n, r in GenerationFields.__annotations__.items()} == fields
