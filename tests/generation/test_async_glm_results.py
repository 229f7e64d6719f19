"""Results of tasks: those of `model.generate`, row for row."""

import copy

import pytest
import torch
import transformers

from genlm_backend import MockAsyncLM
from genlm_backend.errors import ContextError
from genlm_backend.generation import AsyncGLM
from tests.generation.serving import GREEDY
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tokenizer", [None, word_tokenizer()], ids=["bare", "tokenizer"])
def test_greedy_results_equal_those_of_transformers_generate(model, tokenizer):
    batches = [
        torch.tensor([1, 2, 3]),
        torch.tensor([[4, 5, 6], [7, 8, 9]]),
        {
            "input_ids": torch.tensor([[0, 0, 5], [1, 2, 3]]),
            "attention_mask": [[0, 0, 1], [1, 1, 1]],
        },
    ]
    with AsyncGLM(model, tokenizer, generation_kwargs=GREEDY) as glm:
        ids = [glm.submit(batch) for batch in batches]
        results = [glm.get_result(task_id, timeout=60) for task_id in ids]
    for batch, result in zip(batches, results, strict=True):
        rows = batch["input_ids"] if isinstance(batch, dict) else torch.atleast_2d(batch)
        mask = torch.ones_like(rows)
        if isinstance(batch, dict):
            mask = torch.tensor(batch["attention_mask"])
        theirs = model.generate(rows, attention_mask=mask, **GREEDY)
        assert torch.equal(result, theirs)


@pytest.mark.filterwarnings("ignore")
def test_beams_equal_those_of_transformers_generate(model):
    kwargs = {
        **GREEDY,
        "pad_token_id": 1,
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": -1.0,
    }
    with AsyncGLM(model, generation_kwargs=kwargs) as glm:
        result = glm.get_result(glm.submit([[4, 5, 6], [7, 8, 9]]), timeout=60)
    rows = torch.tensor([[4, 5, 6], [7, 8, 9]])
    assert torch.equal(result, model.generate(rows, attention_mask=torch.ones_like(rows), **kwargs))


def test_right_padded_row_gives_the_same_text_as_unpadded(model):
    inputs = {"input_ids": [[5, 6, 0, 0], [1, 2, 3, 4]], "attention_mask": [[1, 1, 0, 0], [1] * 4]}
    with AsyncGLM(model, generation_kwargs=GREEDY) as glm:
        result = glm.get_result(glm.submit(inputs), timeout=60)
        alone = glm.get_result(glm.submit([5, 6]), timeout=60)
    ours = [i for i in result[0, 4:].tolist() if i]
    assert result[0, :4].tolist() == [5, 6, 0, 0]
    assert ours == [i for i in alone[0, 2:].tolist() if i]


LENGTHS = [
    {"max_length": 11},
    {"max_length": 9, "min_length": 9},
    {"max_new_tokens": 5, "max_length": 50, "min_length": 10},
    {"max_length": 12, "min_new_tokens": 3},
    {"max_length": 10, "min_new_tokens": 40},
    {},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_left_padding_counts_to_lengths_as_in_generate(model, lengths, beams):
    """Half of the vocabulary ends a text, so that the least lengths matter too."""
    kwargs = {"eos_token_id": list(range(0, 96, 2)), "pad_token_id": 0, "num_beams": beams}
    rows = torch.tensor([[0, 0, 0, 0, 5], [0, 0, 7, 8, 9], [1, 2, 3, 4, 5], [0, 9, 9, 9, 2]])
    mask = (torch.arange(5) >= torch.tensor([4, 2, 0, 1])[:, None]).long()
    inputs = {"input_ids": rows, "attention_mask": mask}
    with AsyncGLM(model, generation_kwargs={**kwargs, **lengths}) as glm:
        result = glm.get_result(glm.submit(inputs), timeout=60)
    assert torch.equal(result, model.generate(**inputs, **kwargs, **lengths))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_right_padding_counts_to_lengths_as_in_generate(model, lengths):
    """As many columns as in generate; the ids are those of the row without its padding."""
    rows = torch.tensor([[5, 6, 0, 0], [1, 2, 3, 4]])
    inputs = {"input_ids": rows, "attention_mask": (rows > 0).long()}
    kwargs = {"eos_token_id": None, "pad_token_id": 0}
    with AsyncGLM(model, generation_kwargs={**kwargs, **lengths}) as glm:
        result = glm.get_result(glm.submit(inputs), timeout=60)
    theirs = model.generate(**inputs, **kwargs, **lengths)
    assert result.shape == theirs.shape
    assert torch.equal(result[1], theirs[1])
    alone = rows[:1, :2]
    expected = model.generate(
        alone, attention_mask=torch.ones_like(alone), max_new_tokens=result.shape[1] - 4, **kwargs
    )
    assert torch.equal(result[0, 4:], expected[0, 2:])


def test_padded_row_that_fills_max_length_raises_context_error(model):
    inputs = {"input_ids": [[0, 0, 0, 5]], "attention_mask": [[0, 0, 0, 1]]}
    with AsyncGLM(model) as glm, pytest.raises(ContextError, match=r"has 4 tokens .* no room"):
        glm.submit(inputs, {"max_length": 4})


def test_min_length_of_a_task_overrides_the_constructors_minimum(model):
    """The constructor's would be that of new tokens, which goes before the other in generate."""
    eos = list(range(0, 96, 2))
    kwargs = {"eos_token_id": eos, "max_new_tokens": 9, "pad_token_id": 0, "min_new_tokens": 1}
    with AsyncGLM(model, generation_kwargs=kwargs) as glm:
        result = glm.get_result(glm.submit([5, 6, 7], {"min_length": 11}), timeout=60)
    assert result.shape[1] >= 11


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kwargs", [{}, {"eos_token_id": None}, {"eos_token_id": [7, 30]}], ids=str)
@pytest.mark.parametrize("own", [None, 9, [*range(9, 96, 7)]], ids=str)
@pytest.mark.parametrize("pad", [None, 3])
def test_end_tokens_and_padding_equal_those_of_transformers_generate(model, kwargs, own, pad):
    """And not what the tokenizer says; as is what stands behind the end."""
    with torch.no_grad():
        whole = model.generate(torch.tensor([[1, 2]]), max_new_tokens=8, eos_token_id=None)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), eos_token=f"<{whole[0, 4]}>", pad_token="<8>"
    )
    model = copy.deepcopy(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=own, pad_token_id=pad)
    rows = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 9], [11, 30]])
    kwargs = {"max_new_tokens": 30, "repetition_penalty": 1.3, **kwargs}
    with AsyncGLM(model, tokenizer, generation_kwargs=kwargs) as glm:
        result = glm.get_result(glm.submit(rows), timeout=60)
    assert torch.equal(result, model.generate(rows, attention_mask=torch.ones_like(rows), **kwargs))


def test_model_without_generation_config_ends_at_tokenizers_eos():
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), eos_token="<7>", pad_token="<8>"
    )
    with MockAsyncLM(tokenizer) as lm, AsyncGLM(lm) as glm:
        kwargs = {"max_new_tokens": 400, "do_sample": True, "seed": 0}
        ended = glm.get_result(glm.submit([[1], [2], [3], [4]], kwargs), timeout=60)
        assert ended.shape[1] < 401
        for row in ended.tolist():
            assert set(row[row.index(7) + 1 :]) <= {8}
        kwargs["eos_token_id"] = None
        assert glm.get_result(glm.submit([1], kwargs), timeout=60).shape[1] == 401


def test_checkpoint_with_extra_generation_config_keys_generates(model):
    own = copy.deepcopy(model)
    own.generation_config = transformers.GenerationConfig(
        chat_format="chatml", max_window_size=6144, trust_remote_code=True, typical_p=1.0,
        cache_implementation="static", disable_compile=True, num_assistant_tokens=5,
        prefill_chunk_size=8, guidance_scale=1.0, num_beam_groups=1, max_new_tokens=3,
    )  # fmt: skip
    with AsyncGLM(own) as glm:
        assert glm.get_result(glm.submit([1, 2]), timeout=60).shape == (1, 5)


def test_sampling_without_top_k_draws_from_transformers_default_top_50(model):
    """Nobody names top_k: transformers keeps 50 tokens then, of 96."""
    draws = {"do_sample": True, "max_new_tokens": 1, "temperature": 3.0, "eos_token_id": 95}
    kwargs = {**draws, "num_return_sequences": 400, "seed": 0}
    with AsyncGLM(model, generation_kwargs=kwargs) as glm:
        result = glm.get_result(glm.submit([1, 2, 3]), 60)
    allowed = naive_row(model, [1, 2, 3]).topk(50).indices.tolist()
    seen = set(result[:, 3].tolist())
    assert seen <= set(allowed)
    assert len(seen) > 25


def test_generation_config_defaults_of_the_model_apply_to_sampling(model):
    own = copy.deepcopy(model)
    own.generation_config = transformers.GenerationConfig(top_k=1, eos_token_id=95)
    with AsyncGLM(own, generation_kwargs={"do_sample": True, "max_new_tokens": 5}) as glm:
        sampled = glm.get_result(glm.submit([1, 2]), 60)
        greedy = glm.get_result(glm.submit([1, 2], {"do_sample": False}), 60)
    assert torch.equal(sampled, greedy)


def test_seeded_samples_are_reproducible_and_distinct(lm):
    kwargs = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5, "seed": 1}
    with AsyncGLM(lm, generation_kwargs=kwargs) as glm:
        first, second = (glm.get_result(glm.submit([[1, 2], [3, 4]]), 60) for _ in range(2))
    assert first.shape == (6, 7)
    assert torch.equal(first, second)
    assert len({tuple(row) for row in first[:3].tolist()}) == 3
