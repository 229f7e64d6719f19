"""Sampling on every backend."""

import asyncio

import pytest
import torch

from tests.llm.families import VOCAB


def test_samples_depend_on_the_seed_and_on_nothing_else(lm):
    async def main():
        alone = await lm.sample([1, 2], 8, [], seed=3)
        lm.clear_cache()
        crowd = [asyncio.ensure_future(lm.sample([5, i], 6, [], seed=i)) for i in range(5)]
        together = await lm.sample([1, 2], 8, [], seed=3)
        await asyncio.gather(*crowd)
        batch = await lm.batch_sample([[1, 2], [1, 2], [9]], 8, [], seed=3)
        other = await lm.sample([1, 2], 8, [], seed=4)
        return alone, together, batch, other

    alone, together, batch, other = asyncio.run(main())
    assert alone == together == batch[0]
    assert batch[1] != batch[0]  # a stream of its own
    assert other != alone
    assert len(alone) == 8


def test_temperature_zero_is_greedy_and_sampling_ends_before_eos(lm, backend):
    context = [1, 2]
    for _ in range(5):
        context.append(int(backend.expected(context).argmax()))
    assert asyncio.run(lm.sample([1, 2], 5, [], temperature=0)) == context[2:]
    eos = context[4]
    until = context[2 : context.index(eos, 2)]
    assert asyncio.run(lm.sample([1, 2], 5, [eos], temperature=0)) == until
    assert asyncio.run(lm.sample([1, 2], 0, [])) == []


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"temperature": float("nan")}, {"max_tokens": -1}]
)
def test_impossible_sampling_is_refused(lm, options):
    with pytest.raises(ValueError, match="must be zero or more"):
        asyncio.run(lm.sample([1], **{"max_tokens": 3, "eos_token_ids": [], **options}))


def test_samples_follow_the_distribution(lm):
    row = lm.next_token_logprobs_sync([1]).exp().double()
    samples = asyncio.run(lm.batch_sample([[1]] * 3000, 1, [], seed=0))
    counts = torch.bincount(torch.tensor([s[0] for s in samples]), minlength=VOCAB)
    # Every count within six standard deviations of its binomial mean.
    deviation = (counts - 3000 * row).abs() / (3000 * row * (1 - row)).sqrt().clamp_min(1)
    assert float(deviation.max()) < 6
