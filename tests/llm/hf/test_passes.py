"""Histories of batches over a runner that has no model, and knows what each slot must hold."""

import random

import pytest
import torch

from genlm_backend.model.context import of_no_model
from genlm_backend.model.query import Query
from tests.llm.hf.fake_runner import (
    AFRESH,
    Split,
    logprobs_after,
    make,
    question,
)


class Grown(dict):
    """Contexts that stay, each grown from the one before it when it is first asked."""

    def __missing__(self, token_ids):
        before = self[token_ids[:-1]] if token_ids else of_no_model(())
        self[token_ids] = before.extend(token_ids[-1]) if token_ids else before
        return self[token_ids]


def check(passes, asked, adapter=None, made=AFRESH):
    passes.runner.adapter = adapter
    answers = passes.evaluate([question(one, adapter, made) for one in asked])
    for one, answer in zip(asked, answers, strict=True):
        if isinstance(one, Split):
            ends = range(one.start, len(one.text))
            expected = torch.stack([logprobs_after(one.text[:end])[one.text[end]] for end in ends])
        else:
            answer, expected = answer.logprobs, logprobs_after(one)
        torch.testing.assert_close(answer, expected, rtol=0, atol=1e-6)
    passes.tree.check_integrity()


@pytest.mark.parametrize("made", [AFRESH, Grown()], ids=["afresh", "grown"])
@pytest.mark.parametrize("num_slots", [4000, 150])
def test_a_thousand_particles_compute_what_is_distinct(num_slots, made):
    """Every distinct token once, where there is room for all of them."""
    passes, generator = make(num_slots), random.Random(0)
    prompt = tuple(generator.randrange(3) for _ in range(40))
    particles, seen = [prompt] * 50, set()
    for _ in range(20):
        distinct = list(dict.fromkeys(particles))
        check(passes, distinct, None, made)
        seen.update(p[: n + 1] for p in distinct for n in range(len(p)))
        if num_slots == 4000:
            # A few shared tokens may be computed again where a pass more would cost more.
            assert len(seen) <= passes.runner.tokens_computed <= len(seen) + 8 * 20
        particles = [(*generator.choice(particles), generator.randrange(3)) for _ in particles]


def test_a_row_that_is_nan_leaves_nothing_behind():
    passes = make(100)
    forward = passes.runner.forward

    def spoiled(batch, attend):
        return forward(batch, attend) * (torch.nan if len(batch.new_slots) else 1)

    passes.runner.forward = spoiled
    check(passes, [(1, 2, 3), (1, 2, 4)])  # from whole passes
    check(passes, [(1, 2, 3), Split((1, 2, 4, 0), 1), Split((1, 2), 1)])
    assert passes.tree.num_used == 0


def test_the_beginning_of_a_context_remembers_nothing_of_its_end():
    passes, made = make(100), of_no_model((0, 1, 2, 0, 1, 2))
    passes.runner.adapter = None
    passes.evaluate([Query(made)])
    for ids in [(*made[:3], 1, 1, 1), (*made[:-1], 0, 0, 0)]:
        start = 3 if ids[3] == 1 else 5
        branch = made[:start] + ids[start:]
        (row,) = passes.evaluate([Query(branch)])
        torch.testing.assert_close(row.logprobs, logprobs_after(ids), rtol=0, atol=1e-6)
    passes.tree.check_integrity()
