"""Too little room for keys and values: counted token by token, and said once."""

import logging
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from genlm_backend import AsyncTransformer
from tests.llm import families
from tests.llm.conftest import word_tokenizer

SLOT = 2 * 2 * 2 * 8 * 4
MODEL = families.make("llama")
FACTOR = 0x9E3779B97F4A7C15
SAID = "has room for the keys and values of"


def index_of(prefix, digest):
    """Where the digest of a prefix is remembered, behind that of its root."""
    for token in prefix:
        digest = (digest * FACTOR + token + 1) % 2**64
    return (digest * FACTOR % 2**64) >> 48


def make(num_slots):
    return AsyncTransformer(
        MODEL, word_tokenizer(), kv_cache_bytes=num_slots * SLOT, row_cache_bytes=0
    )


@settings(max_examples=60, deadline=None)
@given(
    num_slots=st.integers(6, 14),
    contexts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=40),
)
def test_recomputed_tokens_are_counted(num_slots, contexts):
    known, num_again, num_whole = set(), 0, 0
    with make(num_slots) as lm:
        tree = lm._evaluator.scheduler.tree
        for context in contexts:
            num_kept = tree.num_cached(context)
            prefixes = [tuple(context[: i + 1]) for i in range(len(context))]
            num_again += sum(prefix in known for prefix in prefixes[num_kept:])
            known.update(prefixes)
            # The last token goes through the model anyway, and may have to make room for itself.
            num_whole += num_kept == len(context)
            lm.next_token_logprobs_sync(context)
        root = int(tree.nodes.digest[tree.root(None)])
        assume(len({index_of(prefix, root) for prefix in known}) == len(known))
        counted = lm.statistics().num_recomputed_tokens
        assert num_again <= counted <= num_again + num_whole
        lm.clear_cache()
        for context in contexts[:1]:
            lm.next_token_logprobs_sync(context)
        assert lm.statistics().num_recomputed_tokens == counted


def test_cached_tokens_of_scored_text_are_not_counted_as_recomputed():
    """As those of a text that is scored, which go through the model whatever is kept."""
    with make(9) as lm:
        for text in ([1, 2, 3], [4, 5, 6], [11, 12, 13], [21, 22, 23], [1, 2, 3]):
            lm.next_token_logprobs_sync(text)
        counted = lm.statistics().num_recomputed_tokens
        assert counted in (2, 3)
        for _ in range(5):
            lm.score_sync([1], [2, 3, 4])
        assert lm.statistics().num_recomputed_tokens == counted


def ask_growing(lm, num_rounds=2):
    for _ in range(num_rounds):
        for first in range(10):
            for size in range(1, 12):
                lm.next_token_logprobs_sync([first, *range(size)])


@pytest.mark.parametrize("num_slots", [8, 40])
def test_too_small_cache_warns_once(num_slots, caplog):
    with make(num_slots) as lm, caplog.at_level(logging.WARNING, "genlm_backend"):
        with pytest.warns(RuntimeWarning, match=SAID) as told:
            ask_growing(lm, 12 if num_slots == 40 else 2)
        assert len(told) == len(caplog.records) == 1
        shown = warnings.formatwarning(
            told[0].message, told[0].category, told[0].filename, told[0].lineno
        )
        assert shown == f"<genlm_backend>:0: RuntimeWarning: {told[0].message}\n"
        assert "Raise kv_cache_bytes" in caplog.text
        hits = lm.statistics()
        assert hits.hit_rate == hits.tokens_reused / (hits.tokens_computed + hits.tokens_reused)
        assert f"hit_rate={hits.hit_rate}" in repr(hits) or "hit_rate" in repr(hits)


def test_warning_turned_into_error_loses_no_row():
    with make(8) as lm, warnings.catch_warnings():
        warnings.simplefilter("error")
        ask_growing(lm)


def test_warning_is_filtered_by_module_name():
    with make(8) as lm, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=r"genlm_backend\.")
        ask_growing(lm)
    assert not [each for each in told if SAID in str(each.message)]


def test_no_warning_with_enough_room_without_reuse_or_without_cache():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with make(400) as lm:
            ask_growing(lm, 4)
            assert lm.statistics().num_recomputed_tokens == 0
        with make(40) as lm:  # thousands of texts, each of them once
            for i in range(800):
                lm.next_token_logprobs_sync([i % 90, (i // 90) % 90, 1, 2])
            assert lm.statistics().num_evicted_tokens > 1000
        with make(0) as lm:  # nothing is to be kept
            ask_growing(lm)
    assert not [each for each in told if SAID in str(each.message)]
