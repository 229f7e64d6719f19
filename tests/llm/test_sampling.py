"""Sampling on every backend."""

import asyncio
import copy
import pickle
import re

import numpy as np
import pytest
import torch

from genlm_backend import MockAsyncLM
from genlm_backend.errors import OptionError, OptionTypeError
from genlm_backend.llm import Sampled
from tests.llm.conftest import word_tokenizer
from tests.llm.families import VOCAB


async def test_samples_depend_on_the_seed_and_on_nothing_else(lm):
    alone = await lm.sample([1, 2], 8, [], seed=3)
    lm.clear_cache()
    crowd = [asyncio.ensure_future(lm.sample([5, i], 6, [], seed=i)) for i in range(5)]
    together = await lm.sample([1, 2], 8, [], seed=3)
    await asyncio.gather(*crowd)
    batch = await lm.batch_sample([[1, 2], [1, 2], [9]], 8, [], seed=3)
    other = await lm.sample([1, 2], 8, [], seed=4)
    assert alone == together == batch[0]
    assert batch[1] != batch[0]  # a stream of its own
    assert other != alone
    assert len(alone) == 8


async def test_temperature_zero_is_greedy_and_sampling_ends_before_eos(lm, backend):
    context = [1, 2]
    for _ in range(5):
        context.append(int(backend.expected(context).argmax()))
    assert await lm.sample([1, 2], 5, [], temperature=0) == context[2:]
    eos = context[4]
    until = context[2 : context.index(eos, 2)]
    assert await lm.sample([1, 2], 5, [eos], temperature=0) == until
    assert await lm.sample([1, 2], 0, []) == []


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"temperature": float("nan")}, {"max_tokens": -1}]
)
async def test_invalid_temperature_and_max_tokens_are_refused(lm, options):
    with pytest.raises(ValueError, match=r"must be an? \w+ of 0 or more"):
        await lm.sample([1], **{"max_tokens": 3, "eos_token_ids": [], **options})


async def test_invalid_prompt_in_a_batch_of_samples_raises_value_error(lm):
    for wrong in ([], [VOCAB]):
        with pytest.raises(ValueError, match="token"):
            await lm.batch_sample([[1], wrong, [2]], 3, [])
    assert len(await lm.sample([1], 3, [])) == 3


async def test_samples_follow_the_distribution(lm):
    row = lm.next_token_logprobs_sync([1]).exp().double()
    samples = await lm.batch_sample([[1]] * 3000, 1, [], seed=0)
    counts = torch.bincount(torch.tensor([s[0] for s in samples]), minlength=VOCAB)
    # Every count within six standard deviations of its binomial mean.
    deviation = (counts - 3000 * row).abs() / (3000 * row * (1 - row)).sqrt().clamp_min(1)
    assert float(deviation.max()) < 6


async def test_infinite_temperature_is_uniform_and_tiny_temperature_greedy():
    """Of 96 ids, those beyond 90 are of no token."""
    with MockAsyncLM(word_tokenizer(90), vocab_size=VOCAB) as lm:
        hot = await lm.batch_sample([[1]] * 3000, 1, [], temperature=np.inf, seed=0)
        counts = np.bincount([ids[0] for ids in hot], minlength=VOCAB)
        assert counts[90:].sum() == 0
        assert counts[:90].min() > 5
        greedy = await lm.sample([1], 6, [], temperature=0)
        assert await lm.sample([1], 6, [], temperature=1e-42, seed=0) == greedy


async def test_progress_is_shown_only_on_request_and_to_a_terminal(lm, capsys, monkeypatch):
    async def shown(progress):
        await lm.batch_sample([[1], [2], [3]], 2, [], seed=0, progress=progress)
        return capsys.readouterr().err

    assert await shown(False) == await shown(True) == ""
    monkeypatch.setattr("genlm_backend.runtime.progress.is_watched", lambda: True)
    assert await shown(False) == ""
    assert "3/3" in await shown(True)


@pytest.mark.parametrize("token_id", [-1, VOCAB, 10**7])
async def test_eos_id_outside_the_vocabulary_is_refused_before_any_query(lm, token_id):
    before = lm.statistics().num_awaits
    message = f"eos_token_ids has {token_id}, which is outside the vocabulary of {VOCAB} ids"
    with pytest.raises(OptionError, match=message):
        await lm.sample([1], 3, [2, token_id])
    with pytest.raises(OptionError, match=message):
        await lm.batch_sample([[1], [2]], 3, {token_id})
    assert lm.statistics().num_awaits == before


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_new_tokens", "max_tokens?"),
        ("eos_token_id", "eos_token_ids?"),
        ("sed", "seed?"),
    ],
)
async def test_unknown_sampling_option_suggests_a_similar_one(lm, name, meant):
    before = lm.statistics().num_awaits
    message = re.escape(f"{name} is not an option of ") + r"\w+; did you mean " + re.escape(meant)
    with pytest.raises(OptionTypeError, match=message):
        await lm.sample([1], 3, **{name: 2})
    with pytest.raises(OptionTypeError, match=message):
        await lm.batch_sample([[1], [2]], 3, **{name: 2})
    assert lm.statistics().num_awaits == before


async def test_sample_reaching_max_length_ends_with_finish_reason_length(backend):
    """Whatever is asked for, it begins with the same ids; and it says why there are no more."""
    with backend.make(max_length=9) as lm:
        whole = await lm.sample([1, 2], 8, [], seed=5)
        assert (len(whole), whole.finish_reason) == (8, "length")
        for max_tokens in (0, 1, 7, 8, 9, 500):
            found = await lm.sample([1, 2], max_tokens, [], seed=5)
            assert found == whole[:max_tokens]
            assert found.finish_reason == "length"
            (batched, other) = await lm.batch_sample([[1, 2], [1] * 9], max_tokens, [], seed=5)
            assert (batched, batched.finish_reason) == (whole[:max_tokens], found.finish_reason)
            assert len(other) == min(max_tokens, 1)
        ended = await lm.sample([1, 2], 500, [whole[3]], seed=5)
        assert ended == whole[: whole.index(whole[3])]
        assert ended.finish_reason == "eos"
        row = await lm.next_token_logprobs([1, 2, *whole[:-1]])  # nothing longer was asked
        assert torch.isfinite(row).any()
        with pytest.raises(ValueError, match=r"10 tokens.*maximum of 9"):
            await lm.sample([1] * 10, 3, [])


def test_sampled_is_a_list_that_pickles_and_copies():
    found = Sampled([3, 1], "eos")
    assert isinstance(found, list)
    assert found == [3, 1]
    for again in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert (again, again.finish_reason, type(again)) == ([3, 1], "eos", Sampled)
