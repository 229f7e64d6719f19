"""Histories of batches over a runner that has no model, and knows what each slot must hold."""

import contextlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.common_prefix import common_length
from genlm_backend.errors import QueryDroppedError
from genlm_backend.model.context import of_no_model
from genlm_backend.model.query import Adapter, Query
from tests.llm.hf.fake_runner import (
    AFRESH,
    Split,
    logprobs_after,
    make,
    question,
    rows_of,
    splits,
)


class Grown(dict):
    """Contexts that stay, each grown from the one before it when it is first asked."""

    def __missing__(self, token_ids):
        before = self[token_ids[:-1]] if token_ids else of_no_model(())
        self[token_ids] = before.extend(token_ids[-1]) if token_ids else before
        return self[token_ids]


class Branched(dict):
    """Contexts that stay, each made of the beginning of one that was asked before it."""

    def __missing__(self, token_ids):
        most, source = 0, of_no_model(())
        for known, context in self.items():
            shared = common_length(known, token_ids)
            if shared > most:
                most, source = shared, context
        self[token_ids] = source[:most] + token_ids[most:]
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


contexts = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
batches = st.lists(contexts | splits, min_size=1, max_size=8, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), batches, st.sampled_from([None, Adapter("a", 1)])),
        st.tuples(st.just("forget"), contexts, st.integers(0, 6)),
        st.tuples(st.just("fail"), batches, st.integers(0, 3)),
        st.tuples(st.just("drop"), batches, st.integers(0, 3)),
        st.tuples(st.just("no memory"), batches, st.integers(0, 2)),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(
    steps,
    st.sampled_from([None, 0, 1, 3, 8, 20, 60, 1000]),
    st.sampled_from([0.0, 3.0, 1000.0]),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from([4, 1000]),
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([None, Grown, Branched]),
)
def test_whatever_happens_rows_and_scores_are_those_of_their_contexts(
    steps, num_slots, per_forward, max_segment, max_tokens, max_outputs, kind
):
    made = AFRESH if kind is None else kind()
    cost = {"per_forward": per_forward, "max_segment": max_segment, "max_tokens": max_tokens}
    passes = make(num_slots, **cost, max_outputs=max_outputs)
    for action, first, second in steps:
        if action == "ask":
            check(passes, first, second, made)
        elif action == "clear":
            passes.tree.clear()
            assert passes.tree.num_used == 0
        elif action == "forget":
            passes.tree.forget(first, None, second)
        elif action == "no memory":
            passes.runner.failing = [MemoryError()] + [None] * second
            if len(first) > 1:
                check(passes, first, None, made)
            passes.runner.failing = []
        else:
            trouble = IndexError("by the test")
            if action == "fail":
                passes.runner.failing = [trouble] + [None] * second
            else:
                passes.wanted.extend([False] + [True] * second)
            passes.runner.adapter = None
            with contextlib.suppress(IndexError, QueryDroppedError):  # or it needed fewer passes
                passes.evaluate([question(one, None, made) for one in first])
            passes.runner.failing = []
            passes.wanted.clear()
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


def test_a_token_that_overflows_spoils_no_score_before_it():
    """A pass with token 4 in it is NaN from its first output on; a row of a prefix is not."""
    passes = make(100)
    forward = passes.runner.forward

    def spoiled(batch, attend):
        logits, first = forward(batch, attend), 0
        for span in rows_of(batch):
            if 4 in span.token_ids:
                logits[first : first + len(span.outputs)] = torch.nan
            first += len(span.outputs)
        return logits

    passes.runner.forward = spoiled
    text = (1, 2, 0, 1, 2, 2, 4, 1, 0)
    (scores,) = passes.evaluate([question(Split(text, 2))])
    assert scores[:5].isfinite().all()
    assert scores[5:].isnan().all()  # of the contexts that have the token
    expected = [logprobs_after(text[:end])[text[end]] for end in range(2, 7)]
    torch.testing.assert_close(scores[:5], torch.stack(expected), rtol=0, atol=1e-6)
    assert passes.tree.num_used == 0


def test_a_prompt_under_a_hundred_continuations_is_computed_once_and_kept():
    passes, prompt = make(1000, per_forward=0.0), tuple(i % 3 for i in range(60))
    asked = [Split((*prompt, i % 5, i % 3, i // 25), 60) for i in range(100)]
    asked = list(dict.fromkeys(asked))
    check(passes, asked)
    distinct = {split.text[:end] for split in asked for end in range(1, len(split.text))}
    assert passes.runner.tokens_computed == len(distinct)
    check(passes, [(*prompt, 1)])  # from what was kept
    assert passes.runner.tokens_computed == len(distinct) + 1
    check(passes, [Split((*prompt, 4, 4), 60)])  # all but the token before the first score
    assert passes.runner.tokens_computed == len(distinct) + 3


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


def test_what_a_context_remembers_is_found_without_a_look_at_its_tokens():
    """Only what comes after the place is handed to the tree."""
    passes, followed = make(4000), []
    walk = passes.tree.nodes.walk

    def noted(node, tokens):
        followed.append(len(tokens))
        return walk(node, tokens)

    passes.tree.nodes.walk = noted
    passes.runner.adapter = None
    context = of_no_model((1, 2) * 1000)
    passes.evaluate([Query(context)])
    for token_id in (3, 4, 3):
        followed.clear()
        context = context.extend(token_id)
        passes.evaluate([Query(context)])
        assert followed == []
    passes.tree.forget(context, keep=1500)
    followed.clear()
    passes.evaluate([Query(context.extend(1))])
    assert followed == [2003]  # from the beginning
    passes.tree.check_integrity()
