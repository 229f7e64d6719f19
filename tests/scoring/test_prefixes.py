"""Probabilities of prefixes against sums over all tokenisations of a tiny vocabulary."""

import asyncio
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend import (
    MockAsyncLM,
    PrefixLogprob,
    continuations_sync,
    load_model_by_name,
    prefix_logprob,
    prefix_logprob_sync,
    surprisal_sync,
)
from genlm_backend.errors import ContextError, OptionError, OptionTypeError
from tests.scoring.vocabularies import LETTERS, Rows, many_ways, mock

BYTES = b"ab \xc3\xa9"
texts = st.lists(st.sampled_from(BYTES), max_size=6).map(bytes)


@pytest.fixture(scope="module")
def lm():
    with mock() as lm:
        yield lm


@pytest.fixture(scope="module")
def rows(lm):
    return Rows(lm)


@pytest.mark.parametrize("data", [b"a", b"ab", b"a b", "é".encode(), b"\xc3", b"a ba", b"c", b" c"])
def test_prefix_logprob_sums_over_all_token_sequences(lm, rows, data):
    """Of all sequences of so many tokens, of which each has one byte at least, or that end."""
    total, sequences = 0.0, [((0,), b"", 1.0)]
    for ids, spelt, own in sequences:
        if len(ids) > len(data):
            total += own if spelt.startswith(data) else 0.0
            continue
        total += own * rows.behind(ids)[1] if spelt.startswith(data) else 0.0
        for token_id, probability in rows.behind(ids)[0]:
            behind = spelt + rows.spelling(token_id)
            sequences.append(((*ids, token_id), behind, own * probability))
    found = prefix_logprob_sync(lm, None, data, max_rest=0, max_contexts=10**6)
    assert found.log_rest == -math.inf
    assert math.exp(found.logprob) == pytest.approx(total, rel=1e-5, abs=0)


@given(st.sampled_from([[0], [0, 2], [3, 9]]), texts)
@settings(max_examples=100, deadline=None)
def test_prefix_probability_is_the_sum_over_next_bytes_and_the_end(lm, rows, context, data):
    options = {"max_rest": 0, "max_contexts": 10**6}
    own = math.exp(prefix_logprob_sync(lm, context, data, **options).logprob)
    further = [prefix_logprob_sync(lm, context, data + bytes([i]), **options) for i in BYTES]
    total = math.fsum(math.exp(each.logprob) for each in further)
    assert own == pytest.approx(total + rows.ended(context, data), rel=1e-5, abs=1e-12)
    assert own == pytest.approx(rows.prefix(context, data), rel=1e-5, abs=1e-12)


@given(texts, st.sampled_from([0, 1e-3, 0.1, 1]), st.integers(1, 30), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_exact_probability_is_within_the_bounds(rows, data, max_rest, max_contexts, batch_size):
    with mock(batch_size=batch_size) as lm:
        found = prefix_logprob_sync(lm, None, data, max_rest=max_rest, max_contexts=max_contexts)
        assert lm.statistics().num_awaits <= 2 * max_contexts
    own = rows.prefix([0], data)
    assert math.exp(found.logprob) <= own * (1 + 1e-5)
    assert own <= math.exp(found.upper) * (1 + 1e-5)
    if max_contexts == 30 and len(data) < 4:
        share = math.exp(found.log_rest - found.upper) if found.upper > -math.inf else 0
        assert share <= max_rest + 1e-9


def words_of(rows, context, data, is_given):
    """The probability that a text is some bytes whose last word ends, by all its tokens."""
    blanks = (b" ", "\u2003".encode(), "\u2029".encode())  # those that the tokens can spell
    total = rows.ended(context, data) + sum(rows.prefix(context, data + own) for own in blanks)
    if not is_given:
        return total
    own, end = rows.behind(context)
    return total / (end + sum(p for i, p in own if rows.spelling(i).startswith(blanks)))


@pytest.mark.parametrize("context", [[0], [0, 5], [0, 2], [0, 6, 3], [0, 9, 10], [0, 2, 12]])
@pytest.mark.parametrize("data", [b"", b"a", b" a", b"  ab", b"ab a", b" b\xc3", b"c", b" c"])
def test_ended_word_sums_over_the_end_and_every_following_blank(context, data):
    """Of a vocabulary with a blank of three bytes, as a token, in parts and behind a letter."""
    tokens = [*LETTERS, "âĢĥ", "âĢ", "â", "aâĢĥ", "ĥ"]
    with MockAsyncLM(many_ways(tokens)) as lm:
        rows = Rows(lm)
        assert rows.spelling(12) == "\u2003".encode()
        is_given = data.startswith(b" ") and context not in ([0], [0, 5], [0, 2, 12])
        options = {"word_ends": True, "max_contexts": 10**6}
        found = prefix_logprob_sync(lm, context, data, max_rest=0, **options)
        own = words_of(rows, context, data, is_given)
        assert math.exp(found.logprob) == pytest.approx(own, rel=1e-5, abs=0)
        assert found.log_rest == -math.inf
        loose = prefix_logprob_sync(lm, context, data, max_rest=0.3, word_ends=True)
        assert math.exp(loose.logprob) <= own * (1 + 1e-5)
        assert own <= math.exp(loose.upper) * (1 + 1e-5)
        if loose.upper > -math.inf:
            assert math.exp(loose.log_rest - loose.upper) <= 0.3 + 1e-9


def test_ended_words_agree_with_continuations(lm):
    """All but the blanks before a word, of which a single one is asked about."""
    found = continuations_sync(lm, [0, 2], 50, max_rest=0, max_contexts=3000)
    for word in [own for own in found if "\ufffd" not in own.text][:5]:
        blanks = [" " * size + word.text for size in range(1, 8)]
        options = {"word_ends": True, "max_rest": 0, "max_contexts": 10**6}
        own = [prefix_logprob_sync(lm, [0, 2], text, **options).logprob for text in blanks]
        total = math.fsum(map(math.exp, own))
        assert math.exp(word.logprob) * (1 - 1e-3) <= total
        assert total <= math.exp(word.logprob) * (1 + 1e-3) + math.exp(found.log_rest)


@pytest.mark.parametrize("letter", ["a", "é"])
@pytest.mark.parametrize("before", ["", " ", "b ", "abéb"])
@pytest.mark.parametrize("is_string", [True, False])
def test_custom_word_ends_unless_its_pattern_matches_further(lm, rows, letter, before, is_string):
    words = f"{letter}+|[^{letter}]+"
    words = words if is_string else re.compile(words)
    options = {"word_ends": True, "words": words, "max_rest": 0, "max_contexts": 10**6}
    text = before + letter
    found = prefix_logprob_sync(lm, [0, 2], text, **options)
    data = text.encode()
    total = rows.prefix([0, 2], data) - rows.prefix([0, 2], data + letter.encode())
    assert math.exp(found.logprob) == pytest.approx(total, rel=1e-5, abs=0)
    assert found.log_rest == -math.inf


def test_custom_words_agree_with_continuations(lm, rows):
    words = "a+|[^a]+"
    found = continuations_sync(lm, [0, 2], 50, words=words, max_rest=0, max_contexts=3000)
    rest = math.exp(found.log_rest)
    own = [word for word in found if "\ufffd" not in word.text and len(word.text) < 4]
    assert {"a", "b", " "} < {word.text for word in own}
    for word in own:
        options = {"word_ends": True, "words": words, "max_rest": 0, "max_contexts": 10**6}
        exact = math.exp(prefix_logprob_sync(lm, [0, 2], word.text, **options).logprob)
        assert math.exp(word.logprob) * (1 - 1e-5) <= exact
        assert exact <= math.exp(word.logprob) * (1 + 1e-5) + rest
        if "a" not in word.text:
            data = word.text.encode()
            total = rows.prefix([0, 2], data + b"a") + rows.ended([0, 2], data)
            assert exact == pytest.approx(total, rel=1e-5, abs=0)


def test_search_asks_for_many_contexts_in_few_batches(lm):
    lm.clear_cache()
    before = lm.statistics()
    prefix_logprob_sync(lm, [0, 5], b"ababab", max_rest=0, max_contexts=10**6)
    after = lm.statistics()
    assert after.num_batches - before.num_batches <= 6 < (after.num_awaits - before.num_awaits) / 3


async def test_empty_prefix_has_probability_one_and_strings_equal_bytes(lm):
    assert await prefix_logprob(lm, None, b"") == PrefixLogprob(0.0, -math.inf)
    assert prefix_logprob_sync(lm, None, "") == PrefixLogprob(0.0, -math.inf)
    assert prefix_logprob_sync(lm, None, "c") == PrefixLogprob(-math.inf, -math.inf)
    both = [prefix_logprob(lm, "ab", "é"), prefix_logprob(lm, [0, 2, 3], "é".encode())]
    one, other = await asyncio.gather(*both)
    assert one == other
    assert one == prefix_logprob_sync(lm, "ab", "é")
    assert one.upper == pytest.approx(
        math.log(math.exp(one.logprob) + math.exp(one.log_rest)), abs=1e-9
    )


def test_sequences_too_long_for_the_model_are_left_to_the_rest(rows):
    with mock() as lm:
        lm.max_length = 3
        found = prefix_logprob_sync(lm, [0], b"ababab", max_rest=0)
    own = rows.prefix([0], b"ababab")
    assert found.log_rest > -math.inf
    assert math.exp(found.logprob) < own <= math.exp(found.upper) * (1 + 1e-5)


def test_invalid_arguments_raise_errors_that_name_them(lm):
    for arguments, options, error, message in (
        ((lm, None, 5), {}, OptionTypeError, "text must be a string or bytes"),
        ((lm, None, "\ud800"), {}, ContextError, "text cannot be encoded as UTF-8"),
        ((lm, [], "a"), {}, ContextError, "context"),
        ((lm, 5, "a"), {}, TypeError, "context"),
        (("gpt2", None, "a"), {}, OptionTypeError, "lm must be an AsyncLM"),
        ((lm, None, "a "), {"word_ends": True}, ContextError, "not with a blank"),
        ((lm, None, "a\u3000"), {"word_ends": True}, ContextError, "not with a blank"),
        ((lm, None, "a"), {"words": "a"}, OptionError, "words applies only with word_ends=True"),
        ((lm, None, "a"), {"word_ends": True, "words": "("}, OptionError, "words must be"),
        ((lm, None, "ab"), {"word_ends": True, "words": "a"}, ContextError, "end with a word"),
        ((lm, None, ""), {"word_ends": True, "words": "a"}, ContextError, "end with a word"),
        ((lm, None, b"\xc3"), {"word_ends": True, "words": "a"}, ContextError, "must be UTF-8"),
        ((lm, None, "a"), {"word_ends": 1}, OptionTypeError, "word_ends"),
        ((lm, None, "a"), {"max_rest": -1}, OptionError, "max_rest"),
        ((lm, None, "a"), {"max_rest": 2}, OptionError, "max_rest"),
        ((lm, None, "a"), {"max_contexts": 0}, OptionError, "max_contexts"),
        ((lm, None, "a"), {"lora_name": "none"}, ValueError, "none"),
    ):
        with pytest.raises(error, match=message):
            prefix_logprob_sync(*arguments, **options)
        with pytest.raises(error, match=message):
            asyncio.run(prefix_logprob(*arguments, **options))


@pytest.mark.real
def test_prefix_bounds_of_smollm2_cover_its_token_scores():
    with load_model_by_name("smollm2") as lm:
        context = [lm.tokenizer.bos_token_id, *lm.tokenizer.encode("The capital of France is")]
        for text in (" Paris", " Pa", " Llanfair", " the city of Paris"):
            found = prefix_logprob_sync(lm, context, text, max_contexts=1000)
            ids = lm.tokenizer.encode(text)
            *before, last = lm.score_sync(context, ids).tolist()
            whole = sum(before) + last  # of one of its tokenisations, ended by none of the others
            assert found.upper >= whole - 1e-3
            assert found.log_rest - found.upper <= math.log(0.011)
        row = lm.next_token_logprobs_sync(context).double()
        begins = [i for i, own in enumerate(lm.byte_vocab) if own.startswith(b" Paris")]
        least = float(row[begins].logsumexp(0))
        found = prefix_logprob_sync(lm, context, " Paris", max_contexts=1000)
        assert least - 1e-4 <= found.upper
        assert found.logprob >= least - 1e-4


@pytest.mark.real
def test_ended_word_of_smollm2_agrees_with_its_surprisal():
    with load_model_by_name("smollm2") as lm:
        context = [lm.tokenizer.bos_token_id, *lm.tokenizer.encode("The capital of France is")]
        for text in (" Paris.", " Oslo."):
            told = surprisal_sync(lm, text, context=context, unit="nats").total
            found = prefix_logprob_sync(lm, context, text, word_ends=True)
            assert found.upper >= -told - 1e-3
            assert found.logprob <= -told + math.log(2)  # other tokenisations are rarer


def test_repr_shows_the_bounds():
    found = PrefixLogprob(math.log(0.25), math.log(0.25))
    assert repr(found) == "PrefixLogprob(logprob=-1.38629, log_rest=-1.38629, upper=-0.693147)"
