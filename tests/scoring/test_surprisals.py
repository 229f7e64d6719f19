"""Surprisals of texts against the rows of their prefixes, and against all words there are."""

import asyncio
import itertools
import math
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from genlm_backend import MockAsyncLM, load_model_by_name, surprisal, surprisal_sync
from genlm_backend.errors import ContextError, MissingExtraError, OptionError, OptionTypeError
from genlm_backend.scoring.words import Spelling, spans_of, word_begins

TEXTS = [
    "The cat sat on the mat.",
    "  Two  blanks,\nand a line.\t",
    "naïve 日本語 text 🙂🙃 end",
    "one",
    " ",
    "a" * 40,
]


@pytest.fixture(scope="module")
def smollm2():
    with load_model_by_name("smollm2", llm_opts={"kv_cache_bytes": 1 << 26}) as lm:
        yield lm


def tiny_tokenizer(**options):
    """Two letters, with and without a blank before them, and a blank."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "a", "b", "Ġ", "Ġa", "Ġb"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ġ", "a"), ("Ġ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"bos_token": "<s>", "eos_token": "</s>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


@pytest.fixture(scope="module")
def tiny():
    with MockAsyncLM(tiny_tokenizer()) as lm:
        yield lm


def logprobs_of(lm, ids):
    """The log-probability of each token but the first, and of an end of a word before it."""
    contexts = [ids[:i] for i in range(1, len(ids) + 1)]
    rows = lm.batch_next_token_logprobs_sync(contexts).double()
    ends = rows[:, word_begins(lm).unpacked()].logsumexp(1)
    own = [float(row[i]) for row, i in zip(rows, ids[1:], strict=False)]
    return own, ends.tolist()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("unit", ["bits", "nats"])
def test_surprisals_of_tokens_come_from_their_rows(smollm2, text, unit):
    begin = smollm2.tokenizer.bos_token_id
    ids = list(smollm2.tokenizer.encode(text))
    found = surprisal_sync(smollm2, text, by="token", unit=unit, entropy=True, rank=True)
    expected, _ = logprobs_of(smollm2, [begin, *ids])
    scale = 1 / math.log(2) if unit == "bits" else 1
    assert [each.surprisal for each in found] == pytest.approx(
        [-own * scale for own in expected], abs=1e-3
    )
    assert [each.token_ids for each in found] == [(i,) for i in ids]
    assert [each.num_context for each in found] == list(range(1, len(ids) + 1))
    assert found.context == (begin,)
    assert found.log_likelihood == pytest.approx(sum(expected), abs=1e-2)
    assert found.perplexity == pytest.approx(math.exp(-sum(expected) / len(ids)), rel=1e-3)
    entropy = smollm2.next_token_entropy_sync([begin, *ids[:-1]]) * scale
    assert found[-1].entropy == pytest.approx(entropy, abs=1e-3)
    assert all(each.rank >= 0 for each in found)
    covered = sorted({i for each in found for i in range(each.start, each.end)})
    assert covered == list(range(len(text)))
    for each in found:
        assert each.text == text[each.start : each.end]


@pytest.mark.parametrize("text", TEXTS)
def test_surprisal_of_a_word_sums_its_tokens_and_its_end(smollm2, text):
    begin = smollm2.tokenizer.bos_token_id
    found = surprisal_sync(smollm2, text, unit="nats")
    assert [each.text for each in found] == (text.split() or [text])
    ids = [i for each in found for i in each.token_ids]
    whole = list(smollm2.tokenizer.encode(text))
    assert ids == whole[: len(ids)]
    assert b"".join(smollm2.byte_vocab[i].byte_string for i in whole[len(ids) :]).isspace() or (
        ids == whole
    )
    tokens, ends = logprobs_of(smollm2, [begin, *whole])
    byte_vocab = smollm2.byte_vocab
    place = 0
    for each in found:
        stop = place + len(each.token_ids)
        expected = sum(tokens[place:stop])
        if not byte_vocab[ids[stop - 1]].byte_string[-1:].isspace():
            expected += ends[stop]
        if place and not byte_vocab[ids[place - 1]].byte_string[-1:].isspace():
            expected -= ends[place]
        assert each.surprisal == pytest.approx(-expected, abs=2e-3)
        assert each.num_context == place + 1
        place = stop
    plain = surprisal_sync(smollm2, text, unit="nats", word_ends=False)
    assert plain.total == pytest.approx(-sum(tokens[: len(ids)]), abs=1e-2)
    assert found.log_likelihood == pytest.approx(plain.log_likelihood, abs=1e-3)


def words_of(length):
    """Words of the tiny vocabulary, by tokens: one token of either kind, and letters."""
    letters = [2, 3]
    return [
        [first, *rest] for first in (5, 6) for rest in itertools.product(letters, repeat=length)
    ]


@pytest.mark.parametrize("behind", ["a", "b ba"])
def test_the_probabilities_of_all_words_sum_to_one(tiny, behind):
    """Words of up to four letters, and what is left to longer ones and to further blanks."""
    total, context = 0.0, [0, *tiny.tokenizer.encode(behind)]
    for length in range(4):
        for ids in words_of(length):
            text = behind + " " + "".join("  ab ab"[i] for i in ids).strip()
            word = surprisal_sync(tiny, text, unit="nats")[-1]
            assert list(word.token_ids) == ids
            total += math.exp(-word.surprisal)
    for ids in words_of(3):
        tokens, ends = logprobs_of(tiny, [*context, *ids])
        begins = ends[len(context) - 1]
        reached = sum(tokens[len(context) - 1 :]) - begins
        total += math.exp(reached) * (1 - math.exp(ends[-1]))
    row = tiny.next_token_logprobs_sync(context).double().exp()
    others = float(row[[0, 1, 4]].sum() / row[[0, 1, 4, 5, 6]].sum())  # no letter comes next
    assert total + others == pytest.approx(1, abs=1e-5)


def test_first_words_and_other_first_tokens_sum_to_one(tiny):
    total = 0.0
    for length in range(1, 5):
        for letters in itertools.product("ab", repeat=length):
            total += math.exp(-surprisal_sync(tiny, "".join(letters), unit="nats")[0].surprisal)
    left = 0.0
    for ids in itertools.product([2, 3], repeat=4):
        tokens, ends = logprobs_of(tiny, [0, *ids])
        left += math.exp(sum(tokens)) * (1 - math.exp(ends[-1]))
    row = tiny.next_token_logprobs_sync([0]).double().exp()
    assert total + left + float(row[[0, 1, 4, 5, 6]].sum()) == pytest.approx(1, abs=1e-5)


def test_text_after_a_context_has_the_surprisals_of_the_whole_text(tiny):
    whole = surprisal_sync(tiny, "ab ba bb")
    behind = surprisal_sync(tiny, " ba bb", context=[0, *tiny.tokenizer.encode("ab")])
    assert [each.surprisal for each in behind] == pytest.approx(
        [each.surprisal for each in whole[1:]], abs=1e-5
    )
    assert behind[0].num_context == 3
    text = surprisal_sync(tiny, " ba bb", context="ab")
    assert text.context == (0, *tiny.tokenizer.encode("ab"))
    assert [each.surprisal for each in text] == [each.surprisal for each in behind]
    # A blank that the context ends with has ended its last word.
    glued = surprisal_sync(tiny, "ba", context="ab ", unit="nats")
    tokens, ends = logprobs_of(tiny, [*glued.context, *glued[0].token_ids])
    own = sum(tokens[len(glued.context) - 1 :]) + ends[-1]
    assert glued[0].surprisal == pytest.approx(-own, abs=1e-5)
    further = surprisal_sync(tiny, " ba", context="ab ", unit="nats")
    tokens, ends = logprobs_of(tiny, [*further.context, *further[0].token_ids])
    own = sum(tokens[len(further.context) - 1 :]) + ends[-1]
    assert further[0].surprisal == pytest.approx(-own, abs=1e-5)


async def test_texts_with_their_own_contexts_are_scored_as_if_alone(tiny):
    texts, contexts = [" ba bb", "ab", " a", "b"], ["ab", [0, 2, 3], "b ", ""]
    options = {"by": "word", "entropy": True}
    found = await surprisal(tiny, texts, contexts=contexts, **options)
    assert found == surprisal_sync(tiny, texts, contexts=contexts, **options)
    for text, context, own in zip(texts, contexts, found, strict=True):
        alone = surprisal_sync(tiny, text, context=context, **options)
        assert list(own) == list(alone)
        assert own.context == alone.context
    assert list(found[-1]) == list(surprisal_sync(tiny, "b", **options))
    assert surprisal_sync(tiny, [], contexts=[]) == []
    with pytest.raises(OptionError, match="got 2 contexts for 4 texts"):
        surprisal_sync(tiny, texts, contexts=contexts[:2])
    with pytest.raises(OptionError, match="pass only one"):
        surprisal_sync(tiny, texts, contexts=contexts, context="a")
    with pytest.raises(OptionError, match="for a single text, pass context"):
        surprisal_sync(tiny, "ab", contexts=["ab"])
    with pytest.raises(OptionTypeError, match="contexts"):
        surprisal_sync(tiny, ["ab"], contexts="a")
    with pytest.raises(TypeError, match=r"contexts\[1\] must be a text or token ids"):
        surprisal_sync(tiny, texts, contexts=["a", 1.5, "b", "a"])


@pytest.mark.parametrize("end", [" ", "\n", "\n\n", "  "])
def test_trailing_blanks_do_not_change_the_last_word(smollm2, tiny, end):
    for lm, text in ((smollm2, "The boats sank"), (tiny, "ab ba")):
        if lm is tiny and "\n" in end:
            continue
        last, other = surprisal_sync(lm, text)[-1], surprisal_sync(lm, text + end)[-1]
        assert other.text == last.text
        assert other.token_ids == last.token_ids
        assert other.surprisal == pytest.approx(last.surprisal, abs=1e-3)


@pytest.mark.parametrize(
    "text", ["Prix: 10\u202f000\u202f€. " * 4, "今日は\u3000いい\u3000天気です。" * 3]
)
def test_no_word_has_a_negative_surprisal(smollm2, text):
    assert min(each.surprisal for each in surprisal_sync(smollm2, text)) >= 0


@pytest.mark.parametrize("stride", [None, 1, 3, 8])
def test_scoring_by_word_uses_the_same_windows_as_by_token(stride):
    with MockAsyncLM(tiny_tokenizer()) as lm:
        lm.max_length = 8
        for length in range(1, 30):
            text = ("ab ba bb aab abab b a bb" * 2)[:length].strip()
            by_token = surprisal_sync(lm, text, by="token", stride=stride)
            for options in ({}, {"word_ends": False}):
                words = surprisal_sync(lm, text, stride=stride, **options)
                assert words.log_likelihood == by_token.log_likelihood
                contexts = {each.start: each.num_context for each in by_token}
                for word in words:
                    assert word.num_context in contexts.values()


def test_end_of_a_long_text_is_conditioned_on_a_whole_window():
    with MockAsyncLM(tiny_tokenizer()) as lm:
        lm.max_length, begins = 8, word_begins(lm).unpacked()

        def log_mass(ids):
            return float(lm.next_token_logprobs_sync([0, *ids]).double()[begins].logsumexp(0))

        for text in ("ab ba bb", "ab ba bb aab", "ab ba bb aab abab b a bb"):
            ids = lm.tokenizer.encode(text)
            tokens = surprisal_sync(lm, text, by="token", unit="nats")
            last = surprisal_sync(lm, text, unit="nats")[-1]
            first = len(ids) - len(last.token_ids)
            begin = log_mass(ids[first - last.num_context + 1 : first])
            own = sum(each.surprisal for each in tokens[first:])
            end = log_mass(ids[-7:])
            assert last.surprisal == pytest.approx(own - end + begin, abs=1e-5)


def test_string_and_compiled_word_patterns_give_equal_surprisals(smollm2):
    given = [r"\S+", re.compile(r"\S+")]
    re.purge()
    given.append(re.compile(r"\S+"))
    found = [surprisal_sync(smollm2, "The cat", words=words)[1].surprisal for words in given]
    assert found == pytest.approx([surprisal_sync(smollm2, "The cat")[1].surprisal] * 3, abs=1e-4)


def test_special_tokens_added_by_the_tokenizer_are_not_scored(tiny):
    """A tokenizer that begins and ends every text; texts may begin with its tokens too."""

    class Around:
        bos_token_id = 0

        def encode(self, text):
            return [0, *tiny.tokenizer.encode(text), 1]

    with MockAsyncLM(tiny_tokenizer()) as lm:
        lm.tokenizer = Around()
        for text in ("ab", "<s>ab", "ab</s>", "</s>"):
            spelling = Spelling(lm, text)
            assert spelling.token_ids == tiny.tokenizer.encode(text)
        found = surprisal_sync(lm, " ba", context="ab")
        assert found.context == (0, 2, 3)


async def test_texts_share_batches_and_score_the_same_as_alone(smollm2):
    smollm2.clear_cache()
    before = smollm2.statistics().num_batches
    found = await surprisal(smollm2, TEXTS, entropy=True)
    assert smollm2.statistics().num_batches - before < len(TEXTS)
    blocking = surprisal_sync(smollm2, TEXTS, entropy=True)
    for text, own, other in zip(TEXTS, found, blocking, strict=True):
        alone = await surprisal(smollm2, text, entropy=True)
        assert own.text == text
        assert [each.surprisal for each in own] == pytest.approx(
            [each.surprisal for each in alone], abs=1e-3
        )
        assert [each.entropy for each in own] == pytest.approx(
            [each.entropy for each in other], abs=1e-3
        )
    assert await surprisal(smollm2, []) == surprisal_sync(smollm2, []) == []


@pytest.mark.parametrize("stride", [None, 1, 3, 7])
def test_long_texts_are_scored_in_overlapping_windows(stride):
    with MockAsyncLM(tiny_tokenizer()) as lm:
        lm.max_length = 8
        text = "ab ba bb aab abab b a bb"
        ids = lm.tokenizer.encode(text)
        found = surprisal_sync(lm, text, by="token", unit="nats", stride=stride)
        step = stride or 4
        assert len(found) == len(ids) > 16
        for i, each in enumerate(found):
            assert each.num_context <= 8
            if i < 8:
                assert each.num_context == i + 1
            else:
                assert each.num_context > 8 - step
            context = [0, *ids[i - each.num_context + 1 : i]]
            row = lm.next_token_logprobs_sync(context)
            assert each.surprisal == pytest.approx(-float(row[ids[i]]), abs=1e-5)
        with pytest.raises(OptionError, match="stride must be at most 8"):
            surprisal_sync(lm, text, stride=9)
        with pytest.raises(ContextError, match="9 tokens, but the model accepts at most 8"):
            surprisal_sync(lm, text, context=[2] * 9)
        # A text that needs no window needs no stride, and a word room for its end.
        surprisal_sync(lm, [text, "a"], contexts=[[0], [2] * 6], by="token", stride=5)
        with pytest.raises(ContextError, match="leaves no room for the end of a word"):
            surprisal_sync(lm, "a", context=[2] * 8)
        assert len(surprisal_sync(lm, "a", context=[2] * 8, by="token")) == 1


def test_words_follow_a_custom_pattern_or_function(smollm2):
    text = "Don't stop, now!"
    found = surprisal_sync(smollm2, text, words=r"\w+|[^\w\s]")
    assert [each.text for each in found] == ["Don", "'t", "stop", ",", "now", "!"]
    tokens = surprisal_sync(smollm2, text, by="token")
    assert found.total == pytest.approx(tokens.total, abs=1e-6)
    assert sum(len(each.token_ids) for each in found) == len(tokens)

    def halves(own):
        return [(0, len(own) // 2), (len(own) // 2, len(own))]

    assert len(surprisal_sync(smollm2, text, words=halves)) <= 2
    assert surprisal_sync(smollm2, text, words=re.compile(r"\S+"))[1].text == "stop,"
    for wrong, error in (
        ("(", OptionError),
        (5, OptionTypeError),
        (lambda own: [(3, 2)], OptionError),
        (lambda own: [(0, 99)], OptionError),
        (lambda own: [(0, 2), (1, 3)], OptionError),
        (lambda own: ["a"], OptionTypeError),
        (lambda own: 5, OptionError),
        (re.compile(rb"a"), OptionTypeError),
    ):
        with pytest.raises(error, match="words must"):
            surprisal_sync(smollm2, text, words=wrong)


def test_invalid_arguments_raise_errors_that_name_them(smollm2, tiny):
    for options, error, message in (
        ({"by": "sentence"}, OptionError, "by must be"),
        ({"unit": "dits"}, OptionError, "unit must be"),
        ({"word_end": True}, OptionTypeError, "did you mean word_ends"),
        ({"entropy": 1}, OptionTypeError, "entropy"),
        ({"stride": 0}, OptionError, "stride"),
        ({"context": []}, ContextError, "context"),
        ({"by": "token", "word_ends": True}, OptionError, "word_ends=True applies only to words"),
        ({"by": "token", "words": "x"}, OptionError, "words applies only with by='word'"),
        ({"words": "x", "word_ends": True}, OptionError, "word_ends=True applies only to words"),
    ):
        with pytest.raises(error, match=message):
            surprisal_sync(tiny, "ab", **options)
    for texts, error, message in (
        ("", ContextError, "at least one token"),
        (["ab", ""], ContextError, r"texts\[1\] must have at least one token"),
        (["ab", "\ud800"], ContextError, r"texts\[1\] cannot be encoded as UTF-8"),
        ([5], OptionTypeError, r"texts\[0\] must be a string"),
        (5, OptionTypeError, "texts"),
        ("c", ContextError, "token"),
    ):
        with pytest.raises(error, match=message):
            surprisal_sync(tiny, texts)
    with pytest.raises(OptionTypeError, match="lm must be an AsyncLM"):
        asyncio.run(surprisal("gpt2", "ab"))
    with MockAsyncLM(tiny_tokenizer(bos_token=None)) as lm:
        with pytest.raises(OptionError, match=r"has no BOS token \(bos_token_id\)"):
            surprisal_sync(lm, "ab")
        assert surprisal_sync(lm, "ab", context=[1]).context == (1,)


def test_table_without_pandas_raises_missing_extra_error(tiny, monkeypatch):
    found = surprisal_sync(tiny, "ab ba")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"genlm-backend\[pandas\]"):
        found.to_dataframe()
    with pytest.raises(MissingExtraError, match=r"genlm-backend\[pandas\]"):
        surprisal_sync(tiny, ["ab ba", "b"]).to_dataframe()
    assert repr(found).startswith("Surprisals('ab' ")
    assert repr(found).endswith("; bits, after '<s>')")


def test_table_has_only_the_requested_columns(tiny):
    pandas = pytest.importorskip("pandas")
    table = surprisal_sync(tiny, "ab ba", rank=True).to_dataframe()
    assert isinstance(table, pandas.DataFrame)
    assert table["text"].tolist() == ["ab", "ba"]
    assert "rank" in table
    assert "entropy" not in table


async def test_table_of_several_texts_has_a_text_index_column(tiny):
    pandas = pytest.importorskip("pandas")
    texts = ["ab ba", "b", "a ab b"]
    found = await surprisal(tiny, texts, entropy=True)
    table = found.to_dataframe()
    assert table.columns[0] == "text_index"
    assert table["text_index"].tolist() == [0, 0, 1, 2, 2, 2]
    assert table["text"].tolist() == [word for text in texts for word in text.split()]
    for i, text in enumerate(texts):
        own = table[table["text_index"] == i].drop(columns="text_index").reset_index(drop=True)
        alone = surprisal_sync(tiny, text, entropy=True).to_dataframe()
        pandas.testing.assert_frame_equal(own, alone)
    assert surprisal_sync(tiny, texts, entropy=True).to_dataframe().equals(table)
    assert surprisal_sync(tiny, []).to_dataframe().empty


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_tokens_cover_every_character_and_words_cover_whole_spans(smollm2, text):
    try:
        spelling = Spelling(smollm2, text)
    except ContextError:  # of a byte that the vocabulary lacks
        assume(not text.isascii())
        return
    tokens, words = spelling.tokens, spelling.words()
    assert {i for own in tokens for i in range(own.start, own.stop)} == set(range(len(text)))
    assert [own.first for own in words] == [0, *(own.last for own in words[:-1])]
    assert words[-1].last <= len(tokens)
    assert not text[words[-1].stop :].strip()
    spans = spans_of(r"\S+", text)
    if spans:
        assert words[0].start == spans[0][0]
        assert words[-1].stop == spans[-1][1]
        for own in words:  # each of them is whole words
            assert own.start in {start for start, _ in spans}
            assert own.stop in {stop for _, stop in spans}


@given(st.text("ab .,é日", min_size=1, max_size=20), st.data())
@settings(max_examples=200, deadline=None)
def test_words_of_any_spans_are_whole_and_share_no_token(smollm2, text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    spans = [pair for pair in itertools.pairwise(cuts) if data.draw(st.booleans())]
    spelling = Spelling(smollm2, text)
    found = spelling.words(lambda _: spans)
    tokens = spelling.tokens
    for start, stop in spans or [(0, len(text))]:
        (own,) = [each for each in found if each.start <= start and stop <= each.stop]
        for i, token in enumerate(tokens):
            if token.start < stop and start < token.stop:
                assert own.first <= i < own.last
    assert [each.first for each in found] == [0, *(each.last for each in found[:-1])]
