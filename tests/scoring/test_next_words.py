"""The words that may come next against sums over all tokenisations of a tiny vocabulary."""

import asyncio
import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend import (
    Continuations,
    continuations,
    continuations_sync,
    load_model_by_name,
    prefix_logprob_sync,
    surprisal_sync,
)
from genlm_backend.errors import ContextError, OptionError, OptionTypeError
from tests.scoring.vocabularies import Rows, mock

MOST_BLANKS = 4


@pytest.fixture(scope="module")
def lm():
    with mock() as lm:
        yield lm


@pytest.fixture(scope="module")
def rows(lm):
    return Rows(lm)


def begin_of(rows, context, is_given):
    """The probability that the text goes on with a blank, or ends."""
    own, end = rows.behind(context)
    blank = sum(p for i, p in own if rows.spelling(i).startswith(b" "))
    return (blank, end, blank + end) if is_given else (1.0, end, 1.0)


def check(rows, found, context, is_given):
    """That each word is within its bounds, by all tokens that may spell it."""
    _, end, scale = begin_of(rows, context, is_given)
    assert math.exp(found.log_end) >= end / scale * (1 - 1e-5)
    rest = math.exp(found.log_rest)
    tail = rows.prefix(context, b" " * MOST_BLANKS) / scale
    for word in found:
        data = word.text.encode()
        total = 0.0
        for blanks in range(is_given, MOST_BLANKS):
            spelt = b" " * blanks + data
            total += rows.prefix(context, spelt + b" ") + rows.ended(context, spelt)
        own = math.exp(word.logprob)
        assert own <= (total / scale + tail) * (1 + 1e-5)
        assert total / scale <= own * (1 + 1e-5) + rest


@pytest.mark.parametrize("context", [None, [0], [0, 2], [0, 6, 3], [0, 5], [0, 9, 10], "a b"])
@pytest.mark.parametrize("max_contexts", [1, 30, 400])
def test_word_probabilities_are_within_their_bounds(lm, rows, context, max_contexts):
    found = continuations_sync(lm, context, 50, max_rest=0, max_contexts=max_contexts)
    is_given = context in ([0, 2], [0, 6, 3], [0, 9, 10], "a b")
    words = [own for own in found if "\ufffd" not in own.text]
    kept = Continuations(
        words,
        context=found.context,
        log_end=found.log_end,
        log_rest=found.log_rest,
        is_proven=found.is_proven,
    )
    check(rows, kept, found.context, is_given)
    assert [own.logprob for own in found] == sorted((own.logprob for own in found), reverse=True)
    assert len({own.text for own in found}) == len(found)
    assert all(re.fullmatch(r"\S+", own.text) for own in found)


@given(
    st.lists(st.sampled_from([2, 3, 5, 6, 7, 8, 9, 10]), max_size=3),
    st.integers(1, 60),
    st.integers(1, 9),
    st.sampled_from([r"\S+", r"[ab]+", r"\w", None]),
)
@settings(max_examples=100, deadline=None)
def test_probabilities_of_words_end_and_rest_sum_to_one(context, max_contexts, batch_size, words):
    options = {} if words is None else {"words": words}
    with mock(batch_size=batch_size) as lm:
        found = continuations_sync(
            lm, [0, *context], 10**6, max_rest=0, max_contexts=max_contexts, **options
        )
        awaits = lm.statistics().num_awaits
    total = [*(own.logprob for own in found), found.log_end, found.log_rest]
    assert math.fsum(map(math.exp, total)) == pytest.approx(1, abs=1e-5)
    assert found.explored == pytest.approx(1 - math.exp(found.log_rest))
    assert awaits <= 2 * max_contexts


def test_single_letter_words_have_the_probabilities_of_prefixes(lm, rows):
    """Single letters: what comes behind one is all the same."""
    found = continuations_sync(lm, [0], 10, words=r"\S", max_rest=1e-4, max_contexts=2000)
    rest = math.exp(found.log_rest)
    assert {own.text for own in found} == {"a", "b", "é", "\ufffd"}
    for word in found:
        if word.text == "\ufffd":
            continue
        total = sum(rows.prefix([0], b" " * n + word.text.encode()) for n in range(6))
        tail = rows.prefix([0], b" " * 6)
        assert total * (1 - 1e-5) - rest <= math.exp(word.logprob) <= (total + tail) * (1 + 1e-5)


def test_order_is_proven_if_the_rest_is_smaller_than_every_gap(lm):
    proofs = set()
    for n, max_contexts in itertools.product((1, 2, 5), (1, 10, 100, 1000)):
        found = continuations_sync(lm, [0, 2], n, max_rest=0, max_contexts=max_contexts)
        more = continuations_sync(lm, [0, 2], n + 1, max_rest=0, max_contexts=max_contexts)
        own = [math.exp(each.logprob) for each in more] + [0.0]
        gaps = [a - b for a, b in itertools.pairwise(own)][:n]
        is_proven = len(found) == n and min(gaps) > math.exp(found.log_rest)
        assert found.is_proven == is_proven
        assert found[:] == more[:n]
        proofs.add(found.is_proven)
        if found.is_proven:
            best = continuations_sync(lm, [0, 2], n, max_rest=0, max_contexts=5000)
            assert [each.text for each in best] == [each.text for each in found]
    assert proofs == {False, True}


def test_words_too_long_for_the_model_are_left_to_the_rest():
    with mock() as lm:
        lm.max_length = 3
        found = continuations_sync(lm, [0, 2], 10**6, max_rest=0, max_contexts=10**6)
        total = [*(own.logprob for own in found), found.log_end, found.log_rest]
        assert math.fsum(map(math.exp, total)) == pytest.approx(1, abs=1e-5)
        assert found.explored < 1
        with pytest.raises(ContextError, match="3"):
            continuations_sync(lm, [0, 2, 2, 2])


async def test_awaited_continuations_equal_blocking_ones_and_have_a_repr(lm):
    awaited, other = await asyncio.gather(continuations(lm, "ab", 3), continuations(lm, "ab", 3))
    found = continuations_sync(lm, "ab", 3)
    assert awaited == other == found
    assert found.context == (0, 2, 3)
    assert repr(found).startswith(f"Continuations({found[0].text!r} 0.")
    assert repr(found).endswith("% explored)")


def test_invalid_arguments_raise_errors_that_name_them(lm):
    for arguments, options, error, message in (
        ((lm, [], 1), {}, ContextError, "context"),
        (("gpt2", None), {}, OptionTypeError, "lm must be an AsyncLM"),
        ((lm, None, 0), {}, OptionError, "n must be"),
        ((lm, None, "x"), {}, OptionTypeError, "n must be"),
        ((lm, None), {"words": "("}, OptionError, "words must be"),
        ((lm, None), {"max_rest": 2}, OptionError, "max_rest"),
        ((lm, None), {"max_contexts": 0}, OptionError, "max_contexts"),
        ((lm, None), {"lora_name": "none"}, ValueError, "none"),
    ):
        with pytest.raises(error, match=message):
            continuations_sync(*arguments, **options)
        with pytest.raises(error, match=message):
            asyncio.run(continuations(*arguments, **options))


@pytest.mark.real
def test_word_probabilities_of_smollm2_agree_with_surprisals():
    with load_model_by_name("smollm2") as lm:
        context = [lm.tokenizer.bos_token_id, *lm.tokenizer.encode("The capital of France is")]
        found = continuations_sync(lm, context, 5)
        assert [own.text for own in found[:2]] == ["Paris.", "Paris,"]
        rest = math.exp(found.log_rest)
        assert rest < 0.1
        for word in found:
            (told,) = surprisal_sync(lm, f" {word.text}", context=context, unit="nats")
            own = math.exp(word.logprob)
            assert math.exp(-told.surprisal) <= own + rest + 1e-4
            assert own <= math.exp(-told.surprisal) * 1.05  # other tokenisations are rare
            prefix = prefix_logprob_sync(lm, context, f" {word.text}")
            assert own <= math.exp(prefix.upper) * 1.01


def test_changed_eos_token_ids_take_effect_in_all_scoring_functions():
    def asked(lm):
        words = continuations_sync(lm, [0], 20, max_rest=0)
        prefix = prefix_logprob_sync(lm, [0], " a", max_rest=0)
        return (
            [*words],
            words.log_end,
            prefix,
            [own.surprisal for own in surprisal_sync(lm, "a b a")],
        )

    with mock() as lm, mock() as other:
        ends = {*lm.eos_token_ids, next(i for i in range(5, 12) if i not in lm.special_ids)}
        before = asked(lm)
        lm._own_eos = other._own_eos = ends  # as a generation config that is changed
        assert asked(lm) == asked(other) != before
