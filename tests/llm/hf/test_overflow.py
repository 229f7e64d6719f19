"""A context that overflows: NaN in its row, and in nobody else's."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend import AsyncTransformer
from genlm_backend.errors import CacheError, EvaluationError
from genlm_backend.queries.row import rows_of_logits
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.hf.fake_runner import (
    FakeRunner,
    Split,
    logits_after,
    make,
    question,
    rows_of,
    splits,
)
from tests.naive import naive_row
from tests.tree_integrity import check_integrity


class OverflowingRunner(FakeRunner):
    """A runner of a model that makes NaN of token 4, and of all that meets it in one pass.

    Attributes:
        batch: Number of the batch that is being answered; to be counted up.
        spoilt: The batch in which NaN has been written to a slot, by slot.
    """

    def __init__(self):
        super().__init__()
        self.batch, self.spoilt = 0, {}

    def forward(self, batch, attend):
        logits, first = super().forward(batch, attend), 0
        for span in rows_of(batch):
            assert {self.spoilt.get(slot, self.batch) for slot in span.past} <= {self.batch}
            has_nan = 4 in span.token_ids or any(slot in self.spoilt for slot in span.past)
            if has_nan:
                logits[first : first + len(span.outputs)] = torch.nan
            for slot in span.slots:
                self.spoilt.pop(slot, None)
                if has_nan:
                    self.spoilt[slot] = self.batch
            first += len(span.outputs)
        return logits


def check(passes, asked):
    """Those contexts alone that have token 4 get NaN, and no slot that is kept is spoilt.

    Of a text with token 4, the scores before it are right or NaN.
    """
    passes.runner.batch += 1
    answers = passes.evaluate([question(one) for one in asked])
    for one, answer in zip(asked, answers, strict=True):
        text, start = (one.text, one.start) if isinstance(one, Split) else (one, len(one))
        if start == len(text):
            assert answer.is_nan if 4 in text else answer.logprobs.equal(logprobs_of(text))
        else:
            for end, score in zip(range(start, len(text)), answer.tolist(), strict=True):
                if 4 in text[:end] or (4 in text[:-1] and math.isnan(score)):
                    assert math.isnan(score)
                else:
                    assert score == pytest.approx(
                        float(logprobs_of(text[:end])[text[end]]), abs=1e-6
                    )
    check_integrity(passes.tree)


def logprobs_of(context):
    return rows_of_logits(logits_after(context).unsqueeze(0))[0].logprobs


overflowing = st.lists(st.sampled_from([0, 1, 2, 4]), min_size=1, max_size=9).map(tuple)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.lists(overflowing | splits, min_size=1, max_size=8, unique=True), min_size=1, max_size=6
    ),
    st.sampled_from([3, 20, 1000]),
    st.sampled_from([0.0, 3.0, 1000.0]),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from([1, 2, 1000]),
)
def test_overflowing_context_corrupts_no_other_row_or_slot(
    batches, num_slots, per_forward, max_chunk, max_outputs
):
    cost = {"per_forward": per_forward, "max_chunk": max_chunk, "max_outputs": max_outputs}
    passes = make(num_slots, OverflowingRunner(), **cost)
    for asked in batches:
        check(passes, asked)


def test_only_overflowing_particle_is_recomputed():
    passes = make(10_000, OverflowingRunner())
    prompt = tuple(i % 3 for i in range(1000))
    particles = [(*prompt, i % 3, i // 3 % 3, i // 9 % 3, i // 27) for i in range(63)]
    particles.append((*prompt, 1, 4))
    for step in range(3):
        before = passes.runner.tokens_computed
        check(passes, particles)
        computed = passes.runner.tokens_computed - before
        if step:  # each its last token, and one its last ones, and all of them whole
            assert computed == 63 + (step + 1) + (1002 + step)
        particles = [(*context, 0) for context in particles]


@pytest.mark.parametrize("num_slots", [None, 10_000])
@pytest.mark.parametrize("first", [1, 2, 100, 190, 199])
def test_overflowing_text_is_run_uncached_once(num_slots, first):
    passes = make(num_slots, OverflowingRunner())
    text = tuple(4 if i == first else i % 3 for i in range(200))
    check(passes, [Split(text, 1)])
    whole = 1 if num_slots is None else 2  # from slots, and once more without them
    assert passes.runner.tokens_computed <= whole * 200


def test_all_nan_text_is_computed_at_most_twice():
    passes = make(10_000, OverflowingRunner())
    (scores,) = passes.evaluate([question(Split((4,) * 200, 1))])
    assert scores.isnan().all()
    assert passes.runner.tokens_computed <= 2 * 200


def test_batch_of_overflowing_contexts_is_run_uncached_once():
    passes = make(10_000, OverflowingRunner())
    contexts = [(4, *(0,) * size) for size in range(10, 20)]
    check(passes, contexts)
    assert passes.runner.tokens_computed <= 2 * sum(map(len, contexts))


@pytest.fixture
def half():
    """A model in half precision whose token 0 overflows, which contexts are padded with."""
    model = families.make("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 1e5
    return model.half()


@pytest.mark.parametrize("kv_cache_bytes", [0, None])
def test_overflowing_padding_token_spoils_no_row_or_score(half, kv_cache_bytes):
    sound = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14], [8, 9, 10, 11]]
    spoilt = [[5, 6, 7, 8, 0], [8, 9, 10, 11, 12, 13, 0]]
    options = {"row_cache_bytes": 0, "kv_cache_bytes": kv_cache_bytes}
    with AsyncTransformer(half, word_tokenizer(), **options) as lm:
        rows = lm.batch_next_token_logprobs_sync([*sound, *spoilt])
        for context, row in zip(sound, rows, strict=False):
            torch.testing.assert_close(row, naive_row(half, context).float(), rtol=0, atol=0.1)
        assert all(row.isnan().all() for row in rows[len(sound) :])
        scores = lm.batch_score_sync([[5, 6]] * 2, [[7, 8, 0, 9], [7, 8, 9, 10, 11, 12, 0, 1]])
        assert all(score[-1].isnan() for score in scores)
        assert not lm.batch_score_sync([[5, 6]] * 2, [[7, 8, 9], [7, 8]])[0].isnan().any()


@pytest.mark.parametrize("options", [{}, {"kv_cache_bytes": 0}])
def test_prompt_with_nan_row_is_not_pinned(options):
    model = families.make("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = torch.nan
    refused = nullcontext() if options else pytest.raises(CacheError, match="NaN")
    with AsyncTransformer(model, word_tokenizer(), **options) as lm, refused:
        lm.cache_kv([1, 13, 2])


def test_nan_token_is_excluded_from_mean_keys():
    model = families.make("llama")
    expected = [naive_row(model, context) for context in ([5, 6, 7], [20, 21, 22], [23, 24])]
    with torch.no_grad():
        model.get_input_embeddings().weight[4] = torch.nan
    with AsyncTransformer(model, word_tokenizer(), kv_cache_dtype="uint4") as lm:
        for context, own in zip(([5, 6, 7], [20, 21, 22], [23, 24]), expected, strict=True):
            row = lm.next_token_logprobs_sync(context)
            assert float((own.exp() * (own - row)).sum()) < 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus inf"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 3}], ids=str)
def test_particle_with_nan_row_is_named_and_the_others_go_on(value, options):
    model = families.make("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(0.1)
        model.model.embed_tokens.weight[4] = value
    with AsyncTransformer(model, word_tokenizer()) as lm:
        group = lm.particles([1, 2, 3], 3, seed=0)
        for last in (0, 4):  # the second step is on arrays
            group.append([5, last, 6])
            if last == 0:
                group.draw_sync(**options)
        with pytest.raises(EvaluationError, match="NaN for 1 of 3 particles, such as particle 1"):
            group.draw_sync(**options)
        group.finish(np.arange(3) == 1)
        draws = group.draw_sync(**options)
        assert (draws.token_ids >= 0).tolist() == [True, False, True]
        expected = naive_row(model, [1, 2, 3, 5, 5])[draws.token_ids[0]]
        assert draws.logprobs[0] == pytest.approx(float(expected), abs=1e-5)
