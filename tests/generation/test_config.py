"""A configuration is right when it is made, or it is not made."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import transformers

from genlm_backend import MockAsyncLM
from genlm_backend.errors import GenerationConfigError
from genlm_backend.generation import GenerationConfig, generate
from tests.llm.conftest import word_tokenizer

SAMPLE = {"do_sample": True}


@pytest.mark.parametrize(
    ("field", "value", "more"),
    [
        ("temperature", -1, SAMPLE),
        ("temperature", 0.5, {"do_sample": False}),
        ("top_k", -1, SAMPLE),
        ("top_k", 5, {"do_sample": False}),
        ("top_p", 0, SAMPLE),
        ("top_p", 1.1, SAMPLE),
        ("top_p", 0.9, {"do_sample": False}),
        ("top_p", 1.0, {"do_sample": False}),
        ("n", 2, {"temperature": 0}),
        ("num_beams", 2, {"temperature": 0.7}),
        ("min_p", 1.5, SAMPLE),
        ("seed", -1, SAMPLE),
        ("n", 0, SAMPLE),
        ("n", 2, {}),
        ("max_new_tokens", 0, {}),
        ("max_length", 0, {}),
        ("min_length", -1, {}),
        ("min_length", 9, {"max_length": 8}),
        ("min_new_tokens", 9, {"max_new_tokens": 8}),
        ("stop", ["a", ""], {}),
        ("stop_words_ids", [[]], {}),
        ("bad_words_ids", [[]], {}),
        ("repetition_penalty", 0, {}),
        ("no_repeat_ngram_size", -1, {}),
        ("top_logprobs", 3, {}),
        ("top_logprobs", -1, {"logprobs": True}),
    ],
)
def test_invalid_field_raises_config_error_that_names_it(field, value, more):
    with pytest.raises(GenerationConfigError, match=rf"^{field} must be "):
        GenerationConfig(**{field: value, **more})


@pytest.mark.parametrize(
    ("fields", "is_sampled"),
    [
        ({}, False),
        ({"seed": 1}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 0.7, "n": 2}, True),
        ({"temperature": 0}, False),
        ({"temperature": 0, "top_k": 5}, False),
        ({"temperature": 0, "do_sample": True}, False),
        ({"top_k": 5}, True),
        ({"top_k": 0}, True),
        ({"top_p": 1.0}, True),
        ({"min_p": 0.0}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"do_sample": True}, True),
        ({"do_sample": False, "temperature": 1.0}, False),
    ],
    ids=str,
)
def test_is_sampled_follows_from_temperature_bounds_and_do_sample(fields, is_sampled):
    assert GenerationConfig(**fields).is_sampled is is_sampled
    assert GenerationConfig().replace(**fields).is_sampled is is_sampled


def test_none_means_unset_and_numpy_numbers_are_converted():
    none = GenerationConfig(stop=None, stop_words_ids=None, bad_words_ids=None)
    assert none == GenerationConfig()
    config = GenerationConfig(
        max_new_tokens=np.int64(3),
        eos_token_id=np.array([1, 2]),
        stop_words_ids=[np.array([3, 4])],
        temperature=np.float32(0.5),
        do_sample=True,
    )
    assert config == GenerationConfig(
        max_new_tokens=3,
        eos_token_id=[1, 2],
        stop_words_ids=[[3, 4]],
        temperature=0.5,
        do_sample=True,
    )
    assert type(config.max_new_tokens) is int
    assert GenerationConfig(eos_token_id=np.int32(7)).eos_token_id == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5}, "stop must be non-empty strings, got 5"),
        ({"eos_token_id": 2.5}, "eos_token_id must be an integer, got 2.5"),
        ({"eos_token_id": True}, "eos_token_id must be an integer, got True"),
        ({"eos_token_id": b"x"}, "eos_token_id must be a token id or a list"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer of 1 or more, got True"),
        ({"max_new_tokens": 3.0}, "max_new_tokens must be .* got 3.0: write 3"),
        ({"max_new_tokens": np.int64(0)}, "max_new_tokens must be an integer of 1 or more, got 0"),
        ({"bad_words_ids": [[True]]}, "bad_words_ids must be non-empty lists of token ids"),
        ({"lora_name": 5}, "lora_name must be a string, got 5"),
    ],
)
def test_error_message_describes_the_rejected_field_value(fields, message):
    with pytest.raises(GenerationConfigError, match=f"^{message}"):
        GenerationConfig(**fields)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "max_new_tokens or min_new_tokens"),
        ("temprature", "temperature"),
    ],
)
async def test_unknown_field_error_suggests_similar_names(lm, name, meant):
    message = rf"^{name} is not a field of GenerationConfig; did you mean {meant}\?$"
    with pytest.raises(GenerationConfigError, match=message):
        GenerationConfig(**{name: 2})
    with pytest.raises(GenerationConfigError, match=message):
        GenerationConfig().replace(**{name: 2})
    with pytest.raises(GenerationConfigError, match=message):
        await generate(lm, [1, 2], **{name: 2})


@pytest.mark.parametrize("value", ["never", 1, 0, "auto"])
def test_non_boolean_early_stopping_error_names_beam_early_stopping(value):
    message = r"early_stopping must be True or False .*, for beam search, is beam_early_stopping"
    with pytest.raises(GenerationConfigError, match=message):
        GenerationConfig(early_stopping=value)


@pytest.mark.parametrize("value", [True, False])
def test_early_stopping_with_beams_raises_config_error(value):
    """Neither what it means here, nor what it means in transformers, is guessed."""
    message = f"left out with num_beams > 1, got {value}: .* is beam_early_stopping here.* eos_"
    with pytest.raises(GenerationConfigError, match=message):
        GenerationConfig(num_beams=2, early_stopping=value)
    with pytest.raises(GenerationConfigError, match=message):
        GenerationConfig(early_stopping=value).replace(num_beams=2)


async def test_empty_eos_token_id_lets_texts_run_to_max_new_tokens(lm):
    """``eos_token_id=()`` is ``early_stopping=False``, for beams too."""
    eos = tuple(range(0, 96, 2))
    for beams in (1, 3):
        (text,) = await generate(lm, [1, 2], num_beams=beams, max_new_tokens=9, eos_token_id=eos)
        assert len(text.token_ids) < 9
        (text,) = await generate(lm, [1, 2], num_beams=beams, max_new_tokens=9, eos_token_id=())
        assert (len(text.token_ids), text.finish_reason) == (9, "length")


@pytest.mark.parametrize("value", [True, False, "never"])
def test_from_hf_maps_early_stopping_to_beam_early_stopping(value):
    hf = transformers.GenerationConfig(early_stopping=value, num_beams=3, max_new_tokens=4)
    config = GenerationConfig.from_hf(hf)
    assert (config.early_stopping, config.beam_early_stopping) == (None, value)
    greedy = GenerationConfig.from_hf(transformers.GenerationConfig(early_stopping=value))
    assert (greedy.early_stopping, greedy.beam_early_stopping) == (None, False)


def test_a_config_is_copied_and_pickled():
    config = GenerationConfig(stop="x", early_stopping=False)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_config_is_frozen_and_replace_validates():
    config = GenerationConfig(max_new_tokens=5, stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n = 3
    other = config.replace(do_sample=True, temperature=0.5)
    assert (config.do_sample, other.do_sample, other.max_new_tokens, other.stop) == (
        None,
        True,
        5,
        ("x",),
    )
    with pytest.raises(GenerationConfigError, match=r"^temperature must be"):
        config.replace(temperature=-0.5)
    with pytest.raises(GenerationConfigError, match=r"^temprature is not a field"):
        config.replace(temprature=0.5)
    with pytest.raises(GenerationConfigError, match=r"did you mean temperature\?"):
        config.replace(temprature=0.5)
    for make in (GenerationConfig, config.replace):
        with pytest.raises(GenerationConfigError, match="mm_info must be a MultiMediaInfo"):
            make(mm_info={"image": b""})


def test_from_hf_maps_supported_fields_and_rejects_others():
    hf = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=5, max_new_tokens=9, eos_token_id=[2, 3]
    )
    config = GenerationConfig.from_hf(hf)
    assert (config.temperature, config.top_k, config.max_new_tokens) == (0.7, 5, 9)
    assert config.eos_token_id == (2, 3)
    assert GenerationConfig.from_hf(transformers.GenerationConfig()) == GenerationConfig()
    sampling = GenerationConfig.from_hf(transformers.GenerationConfig(do_sample=True))
    assert sampling.top_k == 50  # as model.generate, which fills it in
    assert (
        GenerationConfig.from_hf(transformers.GenerationConfig(do_sample=True, top_k=0)).top_k == 0
    )
    beams = GenerationConfig.from_hf(
        transformers.GenerationConfig(
            num_beams=4, num_return_sequences=2, length_penalty=0.5, early_stopping="never"
        )
    )
    expected = GenerationConfig(num_beams=4, n=2, length_penalty=0.5, beam_early_stopping="never")
    assert beams == expected
    for wrong in ({"penalty_alpha": 0.5}, {"num_beam_groups": 2}):
        with pytest.raises(GenerationConfigError, match=next(iter(wrong))):
            GenerationConfig.from_hf(transformers.GenerationConfig(**wrong))


@pytest.mark.parametrize("wrong", [None, 3, "smollm2", []])
def test_from_model_of_a_non_model_raises_type_error(wrong):
    with pytest.raises(TypeError, match="lm must be an AsyncLM, got"):
        GenerationConfig.from_model(wrong)


async def test_transformers_config_in_generate_error_points_to_from_hf():
    with (
        MockAsyncLM(word_tokenizer()) as lm,
        pytest.raises(GenerationConfigError, match=r"of transformers: convert it with .*from_hf"),
    ):
        await generate(lm, [1], transformers.GenerationConfig())
