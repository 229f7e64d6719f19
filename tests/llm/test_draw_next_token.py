"""Tokens drawn from a context, where the model is: the same as from its row."""

import asyncio
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend import MockAsyncLM
from genlm_backend.errors import (
    BatcherClosedError,
    ContextError,
    ContextTypeError,
    EvaluationError,
    OptionError,
    OptionTypeError,
    UnknownAdapterError,
)
from genlm_backend.llm import BatchedLM, Draw, Row, StatelessEvaluator
from genlm_backend.readouts.draw import PackedMask, packed_mask
from tests.llm.conftest import word_tokenizer
from tests.llm.toy import VOCAB

MASK = np.zeros(VOCAB, bool)
MASK[[3, 5, 8, 60, 95]] = True
KINDS = {
    "all": None,
    "mask": MASK,
    "tensor": torch.from_numpy(MASK),
    "ids": [3, 5, 8, 60, 95],
    "set of ids": {3, 5, 8, 60, 95},
    "array of ids": np.array([3, 5, 8, 60, 95]),
    "one": [7],
}


def masked(row, allowed):
    """The row where what is not allowed is impossible, and the logarithm of what is left."""
    if allowed is None:
        return row, 0.0
    is_mask = getattr(allowed, "dtype", None) in (torch.bool, np.dtype(bool))
    ids = np.flatnonzero(allowed) if is_mask else sorted(int(i) for i in allowed)
    kept = torch.full_like(row, -torch.inf)
    kept[torch.as_tensor(ids)] = row[torch.as_tensor(ids)]
    return kept, float(kept.double().logsumexp(0))


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0, float("inf")])
async def test_draw_next_token_equals_a_draw_from_the_masked_row(lm, temperature):
    cases = [(allowed, [i, 1 + i, 2]) for allowed in KINDS.values() for i in range(4)]
    streams = [np.random.default_rng(number) for number in range(len(cases))]
    drawn = await asyncio.gather(
        *(
            lm.draw_next_token(ids, allowed=allowed, generator=stream, temperature=temperature)
            for (allowed, ids), stream in zip(cases, streams, strict=True)
        )
    )
    for number, ((allowed, ids), one) in enumerate(zip(cases, drawn, strict=True)):
        row = await lm.next_token_logprobs(ids)
        kept, log_allowed = masked(row, allowed)
        stream = np.random.default_rng(number)
        again = lm.draw(kept, generator=stream, temperature=temperature)
        assert type(one) is Draw
        assert one.token_id == again
        assert one.logprob == pytest.approx(float(row[again]), abs=1e-4)
        assert one.log_allowed == pytest.approx(log_allowed, abs=1e-4)
        assert streams[number].random() == stream.random()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 9}], ids=str)
async def test_batched_draws_equal_single_draws(lm, options):
    # No special tokens, after which SmolLM2's rows in float32 are 7e-3 from those in float64.
    contexts = [[20 + i % 7, 31 + i % 5, 42] for i in range(40)]
    masks = [list(KINDS.values())[i % len(KINDS)] for i in range(40)]
    one, other, third = (np.random.default_rng(3) for _ in range(3))
    found = await lm.batch_draw_next_token(contexts, allowed=masks, generator=one, **options)
    blocking = lm.batch_draw_next_token_sync(contexts, allowed=masks, generator=third, **options)
    for context, mask, drawn, again in zip(contexts, masks, found, blocking, strict=True):
        single = await lm.draw_next_token(context, allowed=mask, generator=other, **options)
        assert drawn.token_id == again.token_id == single.token_id
        assert list(drawn) == pytest.approx(list(single), abs=1e-4)
    assert one.random() == other.random() == third.random()
    packed = PackedMask(packed_mask(MASK, VOCAB), VOCAB)
    for mask in (MASK, KINDS["tensor"], KINDS["array of ids"], packed):
        one, other = (np.random.default_rng(5) for _ in range(2))
        found = await lm.batch_draw_next_token(contexts, allowed=mask, generator=one, **options)
        given = {"allowed": [mask] * 40, "generator": other, **options}
        expected = lm.batch_draw_next_token_sync(contexts, **given)
        assert [draw.token_id for draw in found] == [draw.token_id for draw in expected]
        assert list(found[0]) == pytest.approx(list(expected[0]), abs=1e-4)
    assert await lm.batch_draw_next_token([]) == lm.batch_draw_next_token_sync([]) == []


async def test_invalid_option_refuses_the_whole_batch_of_draws(lm):
    asked, generator = lm.statistics().num_awaits, np.random.default_rng(0)
    for wrong, error, message in (
        ({"allowed": [None]}, OptionError, r"each of the 2 contexts, got \[None\]"),
        ({"allowed": [None, []]}, OptionError, r"allowed\[1\] contains no token"),
        ({"allowed": [None, [VOCAB]]}, OptionError, r"allowed\[1\] has .*outside"),
        (
            {"allowed": {1, 2, 3}},
            OptionError,
            r"the same ids for all, pass \[ids\] \* len\(contexts\)",
        ),
        ({"allowed": [1, 2]}, OptionError, r"\[ids\] \* len\(contexts\)"),
        ({"allowed": memoryview(b"ab")}, OptionError, "a mask as an array of bools"),
        ({"allowed": MASK[1:]}, OptionError, "allowed must have"),
        ({"allowed": 5}, OptionTypeError, "allowed must be"),
        ({"temperature": -1}, OptionError, "temperature"),
        ({"generator": 5}, OptionTypeError, "generator must be"),
        ({"lora_name": "none"}, UnknownAdapterError, "none"),
    ):
        given = {"generator": generator, **wrong}
        with pytest.raises(error, match=message):
            await lm.batch_draw_next_token([[1], [2]], **given)
        with pytest.raises(error, match=message):
            lm.batch_draw_next_token_sync([[1], [2]], **given)
    with pytest.raises(ContextError):
        await lm.batch_draw_next_token([[1], [VOCAB + 99]], generator=generator)
    with pytest.raises(ContextTypeError):
        await lm.batch_draw_next_token([[1], ["a"]], generator=generator)
    assert lm.statistics().num_awaits == asked
    assert generator.random() == np.random.default_rng(0).random()
    dead, alive = await lm.batch_draw_next_token([[1], [2]], allowed=[[], [3]], impossible="return")
    assert (dead.token_id, alive.token_id) == (-1, 3)


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(*[st.lists(st.booleans(), min_size=n, max_size=n)] * 2)
    )
)
def test_packed_masks_intersect_with_masks_and_token_ids(pair):
    one, other = (np.array(own) for own in pair)
    size = len(one)
    mask = PackedMask(packed_mask(one, size, True), size)
    both = torch.from_numpy(one & other)
    packed = PackedMask(packed_mask(other, size, True), size)
    for allowed in (other, torch.from_numpy(other), np.flatnonzero(other).tolist(), packed):
        found = mask & allowed
        assert torch.equal(found.unpacked(), both)
        assert found == PackedMask(packed_mask(both, size, True), size)
    for wrong in (None, 5, np.ones(size + 1, bool), [size]):
        with pytest.raises((OptionTypeError, OptionError)):
            mask & wrong


async def test_invalid_draw_options_are_refused_before_any_query(lm):
    asked = lm.statistics().num_awaits
    for wrong, error, message in (
        ({"allowed": []}, OptionError, "allowed contains no token"),
        ({"allowed": np.zeros(VOCAB, bool)}, OptionError, "allowed contains no token"),
        ({"allowed": MASK[:-1]}, OptionError, f"allowed must have {VOCAB} elements"),
        ({"allowed": MASK[None]}, OptionError, "allowed must have"),
        ({"allowed": [VOCAB]}, OptionError, f"allowed has {VOCAB}, which is outside"),
        ({"allowed": [-1]}, OptionError, "allowed has -1, which is outside"),
        ({"allowed": [True, False]}, OptionTypeError, "allowed"),
        ({"allowed": MASK.astype(float)}, OptionTypeError, "allowed"),
        ({"allowed": "abc"}, OptionTypeError, "allowed must be an array of bools or a collection"),
        ({"allowed": 5}, OptionTypeError, "allowed must be an array of bools or a collection"),
        ({"generator": 5}, OptionTypeError, "generator must be"),
        ({"temperature": -1}, OptionError, "temperature"),
        ({"temperature": "warm"}, OptionTypeError, "temperature"),
        ({"lora_name": "none"}, UnknownAdapterError, "none"),
    ):
        with pytest.raises(error, match=message):
            await lm.draw_next_token([1], **wrong)
    with pytest.raises(ContextError, match="empty"):
        await lm.draw_next_token([])
    with pytest.raises(ContextTypeError):
        await lm.draw_next_token("abc")
    assert lm.statistics().num_awaits == asked
    lm.close()
    with pytest.raises(BatcherClosedError):
        await lm.draw_next_token([1])


class Impossible(StatelessEvaluator):
    """Rows of one possible token each."""

    def __init__(self):
        super().__init__(VOCAB)

    def evaluate(self, queries):
        rows = torch.full((len(queries), VOCAB), -torch.inf)
        rows[:, 4] = 0.0
        return [Row(row.clone(), 0.0) for row in rows]


async def test_draw_without_possible_allowed_token_fails_alone():
    with BatchedLM(word_tokenizer(), Impossible()) as lm:
        found = await asyncio.gather(
            lm.draw_next_token([1], allowed=[3, 4]),
            lm.draw_next_token([1], allowed=[3, 5]),
            lm.draw_next_token([2]),
            return_exceptions=True,
        )
    assert found[0] == found[2] == Draw(4, 0.0, 0.0, 0.0)
    assert isinstance(found[1], EvaluationError)
    assert "no token can be chosen" in str(found[1])


@pytest.mark.parametrize("width", [VOCAB, VOCAB + 7], ids=["as wide", "with undefined ids"])
async def test_log_allowed_is_zero_for_all_tokens_and_negative_for_fewer(width):
    with MockAsyncLM(word_tokenizer(), vocab_size=width) as lm:
        for i in range(60):
            row = (await lm.next_token_logprobs([i, 3])).double()
            assert row.max() <= 0
            all_defined, most = np.ones(width, bool), np.ones(width, bool)
            all_defined[list(lm.undefined_ids)] = False
            most[int(row[:VOCAB].argmin())] = False
            for allowed in (None, np.ones(width, bool), all_defined, range(width)):
                assert (await lm.draw_next_token([i, 3], allowed=allowed)).log_allowed == 0
            for allowed in (most, [7], MASK.nonzero()[0]):
                _, logprob, log_allowed, _ = await lm.draw_next_token([i, 3], allowed=allowed)
                assert logprob <= log_allowed < 0
                expected = float(row[torch.as_tensor(allowed)].logsumexp(0))
                assert log_allowed == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", [np.uint8, np.int64, torch.int32])
def test_integer_mask_of_vocabulary_length_is_refused(kind):
    mask = torch.from_numpy(MASK).to(kind) if isinstance(kind, torch.dtype) else MASK.astype(kind)
    with pytest.raises(OptionError, match="pass bools"):
        packed_mask(mask, VOCAB)
    assert packed_mask(np.array([0, 1]), VOCAB) == packed_mask([0, 1], VOCAB)


# ---------------------------------------------------------------- several from one row


async def test_draw_next_tokens_equals_as_many_single_draws(lm):
    options = {"allowed": MASK, "temperature": 0.8}
    one, other = (np.random.default_rng(7) for _ in range(2))
    several = await lm.draw_next_tokens([1, 2], 5, generator=one, **options)
    single = [await lm.draw_next_token([1, 2], generator=other, **options) for _ in range(5)]
    assert [draw.token_id for draw in several] == [draw.token_id for draw in single]
    for draw, own in zip(several, single, strict=True):
        assert draw == pytest.approx(own, abs=1e-4)
    assert lm.draw_next_tokens_sync([1, 2], 3, temperature=0) == 3 * [
        lm.draw_next_token_sync([1, 2], temperature=0)
    ]


async def test_refused_draw_leaves_the_generator_untouched(lm):
    generator = np.random.default_rng(0)
    wrong = ({"lora_name": "none"}, {"allowed": [VOCAB]}, {"top_k": -1}, {"temperature": -1})
    for options in wrong:
        for call in (lm.draw_next_token_sync, partial(lm.draw_next_tokens_sync, n=3)):
            with pytest.raises((OptionError, UnknownAdapterError)):
                call([1], generator=generator, **options)
    assert generator.random() == np.random.default_rng(0).random()


async def test_each_distinct_draw_is_from_the_remaining_tokens(lm):
    row = (await lm.next_token_logprobs([1, 2])).double()
    lm.clear_cache()
    found = await lm.draw_next_tokens([1, 2], len(row) + 5, distinct=True)
    assert sorted(draw.token_id for draw in found) == torch.isfinite(row).nonzero()[:, 0].tolist()
    left = torch.isfinite(row)
    for draw in found[:20]:
        assert draw.log_allowed == pytest.approx(float(row[left].logsumexp(0)), abs=1e-4)
        weight = draw.logprob - draw.log_proposal
        assert weight == pytest.approx(draw.log_allowed, abs=1e-5)
        left[draw.token_id] = False
    top = lm.draw_next_tokens_sync([1, 2], 4, distinct=True, temperature=0)
    ids = lm.next_token_top_sync([1, 2], 4).token_ids.tolist()
    assert [draw.token_id for draw in top] == ids


async def test_several_draws_with_nothing_allowed_return_minus_one_or_raise(lm):
    for distinct in (False, True):
        options = {"distinct": distinct, "impossible": "return"}
        found = await lm.draw_next_tokens([1], 3, allowed=[], **options)
        assert [draw.token_id for draw in found] == [-1] * 3
        assert {draw.logprob - draw.log_proposal for draw in found} == {-math.inf}
    with pytest.raises(OptionError, match="no token"):
        await lm.draw_next_tokens([1], 3, allowed=[])


async def test_invalid_options_of_several_draws_are_refused_before_any_query(lm):
    asked = lm.statistics().num_awaits
    for n, options, error, message in (
        (0, {}, OptionError, "n must be"),
        (None, {}, OptionTypeError, "n must be"),
        (2.0, {}, OptionTypeError, "n must be"),
        (2, {"distinct": 1}, OptionTypeError, "distinct"),
        (2, {"generator": 3}, OptionTypeError, "generator"),
        (2, {"top_k": -1}, OptionError, "top_k"),
        (2, {"allowed": [VOCAB]}, OptionError, "allowed"),
    ):
        with pytest.raises(error, match=message):
            await lm.draw_next_tokens([1], n, **options)
    assert lm.statistics().num_awaits == asked


LONG = 10**30
TOO_FAR = f"has {LONG}, which is outside the vocabulary"


@pytest.mark.parametrize(
    ("allowed", "error", "said"),
    [
        (PackedMask("x" * (VOCAB // 8), VOCAB), OptionTypeError, "bits of allowed must be bytes"),
        (PackedMask([1] * (VOCAB // 8), VOCAB), OptionTypeError, "bits of allowed must be bytes"),
        ([LONG], OptionError, TOO_FAR),
        ([1, -LONG], OptionError, f"has -{LONG}, which is outside"),
        (torch.ones(VOCAB, dtype=torch.bfloat16), OptionTypeError, "bools or token ids"),
        (torch.ones(VOCAB, dtype=torch.bool).to_sparse(), OptionTypeError, "bools or token ids"),
        (torch.ones(VOCAB, dtype=torch.bool, device="meta"), OptionTypeError, "bools or token ids"),
    ],
    ids=["text", "list", "far", "below", "bfloat16", "sparse", "meta"],
)
async def test_invalid_mask_fails_alone_and_takes_no_random_number(allowed, error, said):
    generator, untouched = np.random.default_rng(1), np.random.default_rng(1)
    with MockAsyncLM(word_tokenizer()) as lm:
        drawn, refused = await asyncio.gather(
            lm.draw_next_token([1]),
            lm.draw_next_token([2], allowed=allowed, generator=generator),
            return_exceptions=True,
        )
        assert isinstance(drawn, Draw)
        with pytest.raises(error, match=said):
            raise refused
        with pytest.raises(OptionError, match=TOO_FAR):
            await lm.next_token_log_masses([1], [[LONG]])
        with pytest.raises(OptionTypeError, match="chosen must be bools or token ids"):
            await lm.next_token_logprobs_of([1], torch.ones(2, dtype=torch.int64, device="meta"))
        assert lm.statistics().num_awaits == 1
    assert generator.random() == untouched.random()


async def test_overlong_context_leaves_the_generator_untouched():
    generator, untouched = np.random.default_rng(1), np.random.default_rng(1)
    with MockAsyncLM(word_tokenizer(), max_length=3) as lm:
        for verb in (lm.draw_next_token, partial(lm.draw_next_tokens, n=2)):
            with pytest.raises(ContextError, match="more than the model's maximum"):
                await verb([1, 2, 3, 4], generator=generator)
        for verb in (lm.draw_next_token_sync, partial(lm.draw_next_tokens_sync, n=2)):
            with pytest.raises(ContextError, match="more than the model's maximum"):
                verb([1, 2, 3, 4], generator=generator)
        draws = await lm.draw_next_tokens(
            [1], VOCAB + 5, distinct=True, allowed=[], impossible="return"
        )
        assert len(draws) == VOCAB + 5
    assert generator.random() == untouched.random()
