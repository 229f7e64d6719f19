"""Every key of transformers' configuration is honoured, refused, or changes no text."""

import itertools
import random

import pytest
import torch
import transformers

from genlm_backend import AsyncTransformer
from genlm_backend.errors import GenerationConfigError
from genlm_backend.generation import GenerationConfig, generate
from tests.llm.conftest import word_tokenizer

HONOURED = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "max_length",
    "min_length", "min_new_tokens", "eos_token_id", "repetition_penalty", "no_repeat_ngram_size",
    "bad_words_ids", "num_beams", "length_penalty", "early_stopping", "num_return_sequences",
}  # fmt: skip

IGNORED = {
    "transformers_version": ["4.0"],
    "_from_model_config": [True],
    "bos_token_id": [1],
    "pad_token_id": [0],
    "decoder_start_token_id": [1],
    "use_cache": [True, False],
    "cache_implementation": ["dynamic", "static", "hybrid"],
    "cache_config": [{}],
    "max_cache_len": [64],
    "low_memory": [True],
    "prefill_chunk_size": [4],
    "compile_config": [transformers.CompileConfig()],
    "disable_compile": [True, False],
    "continuous_batching_config": [{}],
    "output_attentions": [False],
    "output_hidden_states": [False],
    "output_scores": [True],
    "output_logits": [True],
    "return_dict_in_generate": [False],
    "num_assistant_tokens": [20],
    "num_assistant_tokens_schedule": ["constant"],
    "assistant_confidence_threshold": [0.4],
    "assistant_lookbehind": [10],
    "target_lookbehind": [10],
    "assistant_early_exit": [1],
    "prompt_lookup_num_tokens": [3],
    "max_matching_ngram_size": [2],
    "speculation_type": ["dflash"],
    "use_mtp": [True],
    "diversity_penalty": [0.0, 0.5],
}

REFUSED = {  # → neutral values, and one that changes texts
    "max_time": ([], 0.1),
    "stop_strings": ([], "x"),
    "is_assistant": ([False], True),
    "assistant_ensemble_weight": ([], 0.5),
    "top_h": ([], 0.4),
    "typical_p": ([1.0], 0.9),
    "epsilon_cutoff": ([0.0, 1.0], 0.02),
    "eta_cutoff": ([0.0], 0.02),
    "encoder_repetition_penalty": ([1.0], 1.4),
    "encoder_no_repeat_ngram_size": ([0], 2),
    "renormalize_logits": ([False], True),
    "forced_bos_token_id": ([], 5),
    "forced_eos_token_id": ([], 5),
    "remove_invalid_values": ([False], True),
    "exponential_decay_length_penalty": ([(3, 1.0)], (3, 1.5)),
    "suppress_tokens": ([[]], [5]),
    "begin_suppress_tokens": ([[]], [5]),
    "sequence_bias": ([], [[[5], 2.0]]),
    "token_healing": ([False], True),
    "guidance_scale": ([1.0, 1], 0),
    "watermarking_config": ([], transformers.WatermarkingConfig()),
    "penalty_alpha": ([0.0], 0.6),
    "dola_layers": ([], "low"),
    "num_beam_groups": ([1], 2),
    "constraints": ([], [object()]),
    "force_words_ids": ([], [[5]]),
}
KEYS = vars(transformers.GenerationConfig()).keys()
OF_SAMPLING = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
OF_BEAMS = {"renormalize_logits"}


def with_key(name, value, **others):
    config = transformers.GenerationConfig(**others)
    setattr(config, name, value)  # some values are for other ways to generate
    return config


def test_every_key_of_transformers_config_is_classified():
    """A new release's key fails here: it belongs into one of these, and a table of the library."""
    assert HONOURED | IGNORED.keys() | REFUSED.keys() >= KEYS


@pytest.mark.parametrize("name", sorted(IGNORED.keys() | REFUSED.keys()))
@pytest.mark.parametrize("ways", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_neutral_values_are_ignored(name, ways):
    plain = GenerationConfig.from_hf(transformers.GenerationConfig(**ways))
    for value in [None, *(IGNORED.get(name) or REFUSED[name][0])]:
        assert GenerationConfig.from_hf(with_key(name, value, **ways)) == plain


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & KEYS))
def test_unsupported_value_that_changes_texts_raises_config_error(name):
    ways = {"do_sample": True} if name in OF_SAMPLING else {}
    ways = {"num_beams": 2} if name in OF_BEAMS else ways
    with pytest.raises(GenerationConfigError, match=rf"^{name}=.* is not supported"):
        GenerationConfig.from_hf(with_key(name, REFUSED[name][1], **ways))
    if ways:
        plain = GenerationConfig.from_hf(transformers.GenerationConfig())
        assert GenerationConfig.from_hf(with_key(name, REFUSED[name][1])) == plain


def test_quantized_cache_implementation_raises_config_error():
    with pytest.raises(GenerationConfigError, match="cache_implementation='quantized'"):
        GenerationConfig.from_hf(with_key("cache_implementation", "quantized"))


def test_checkpoint_specific_keys_are_ignored():
    config = transformers.GenerationConfig(
        chat_format="chatml", max_window_size=6144, trust_remote_code=True, max_new_tokens=5
    )
    assert GenerationConfig.from_hf(config) == GenerationConfig(max_new_tokens=5)


def test_unknown_key_of_a_newer_transformers_raises_config_error(monkeypatch):
    class Newer(transformers.GenerationConfig):
        def __init__(self, **kwargs):
            self.novelty = kwargs.pop("novelty", None)
            super().__init__(**kwargs)

    assert GenerationConfig.from_hf(Newer()) == GenerationConfig()
    with pytest.raises(GenerationConfigError, match="novelty=1 is not supported"):
        GenerationConfig.from_hf(Newer(novelty=1))


@pytest.fixture
def lm(model):
    with AsyncTransformer(model, word_tokenizer()) as lm:
        yield lm


LENGTHS = {
    "max_new_tokens": [None, 4, 9],
    "max_length": [None, 8, 12],
    "min_new_tokens": [None, 0, 3, 20],
    "min_length": [None, 0, 10, 30],
}


@pytest.mark.filterwarnings("ignore")
async def test_combined_length_bounds_act_as_in_transformers(lm, model):
    """All of their combinations; half of the vocabulary ends a text, so that the least matter."""
    prompt = [5, 9, 11, 3]
    ids = torch.tensor([prompt])
    eos = list(range(0, 96, 2))
    for values in itertools.product(*LENGTHS.values()):
        lengths = dict(zip(LENGTHS, values, strict=True))
        if lengths["max_new_tokens"] is None and lengths["max_length"] is None:
            continue
        hf = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=0, **lengths)
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=hf)[
            0, 4:
        ].tolist()
        (ours,) = await generate(lm, prompt, GenerationConfig.from_hf(hf))
        assert ours.token_ids == theirs, lengths


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(10))
async def test_random_configurations_give_the_texts_of_transformers(lm, model, seed):
    randomness = random.Random(seed)
    for _ in range(4):
        beams = randomness.choice([1, 1, 2, 3])
        fields = {
            "max_new_tokens": randomness.choice([None, 1, 6, 11]),
            "max_length": randomness.choice([14, 19]),
            "min_new_tokens": randomness.choice([None, None, 0, 5, 40]),
            "min_length": randomness.choice([None, 0, 12, 40]),
            "eos_token_id": randomness.choice([7, [7, 30], list(range(0, 96, 3))]),
            "repetition_penalty": randomness.choice([None, 1.0, 0.7, 1.3]),
            "no_repeat_ngram_size": randomness.choice([None, 0, 1, 3]),
            "bad_words_ids": randomness.choice([None, [[3], [4, 9]], [[7], [30]]]),
            "num_beams": beams,
            "num_return_sequences": randomness.randint(1, beams),
            "length_penalty": randomness.choice([1.0, -1.0, 0.5]) if beams > 1 else None,
            "early_stopping": randomness.choice([True, False, "never"]) if beams > 1 else None,
            "temperature": randomness.choice([None, 1.0]),
            "top_k": randomness.choice([None, 50]),
            "renormalize_logits": randomness.choice([None, beams == 1]),
            "typical_p": randomness.choice([None, 1.0, 0.5]),
            "guidance_scale": randomness.choice([None, 1.0]),
            "use_cache": randomness.choice([None, False]),
            "cache_implementation": randomness.choice([None, "dynamic"]),
            "num_beam_groups": randomness.choice([None, 1]),
        }
        hf = transformers.GenerationConfig(pad_token_id=1)
        for name, value in fields.items():
            setattr(hf, name, value)
        prompt = [randomness.randrange(96) for _ in range(randomness.randint(1, 9))]
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=hf)
        found = await generate(lm, prompt, GenerationConfig.from_hf(hf))
        for ours, row in zip(found, theirs[:, len(prompt) :].tolist(), strict=True):
            assert ours.token_ids == row[: len(ours.token_ids)], (fields, prompt)
            assert set(row[len(ours.token_ids) :]) <= {1}, (fields, prompt)
