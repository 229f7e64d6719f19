"""Surprisals of tokens are those of the packages that psycholinguists use, on the same model."""

import math
from pathlib import Path

import pytest

from genlm_backend import load_model_by_name, surprisal_sync
from genlm_backend.llm import bundled_directory

TEXTS = [
    "The keys to the cabinet are on the table.",
    "The old man the boats",
    "naïve 日本語 text, 🙂🙃 and so on",
    "  Two  blanks,\nand a line",
    "x",
]


@pytest.fixture(scope="module")
def folder():
    return str(Path(bundled_directory("smollm2")))


@pytest.fixture(scope="module")
def lm():
    with load_model_by_name("smollm2") as lm:
        yield lm


def test_tokens_have_the_surprisals_of_minicons(lm, folder):
    from minicons.scorer import IncrementalLMScorer  # pyright: ignore[reportMissingImports]

    theirs = IncrementalLMScorer(folder, device="cpu").token_score(
        TEXTS, surprisal=True, base_two=True, rank=True, bos_token=True
    )
    ours = surprisal_sync(lm, TEXTS, by="token", rank=True)
    for found, expected in zip(ours, theirs, strict=True):
        # The first of theirs is the token that texts begin with; their ranks begin at one.
        values = [value for _, value, _ in expected[1:]]
        assert [own.surprisal for own in found] == pytest.approx(values, abs=2e-3)
        for own, (_, _, rank) in zip(found, expected[1:], strict=True):
            assert rank - 1 == pytest.approx(own.rank, abs=2, rel=1e-3)  # of nearly equal tokens


def test_words_have_the_surprisals_of_minicons_where_spaces_alone_separate_them(lm, folder):
    """Line ends and ends of texts, which end a word here too, are left out of theirs."""
    from minicons.scorer import IncrementalLMScorer  # pyright: ignore[reportMissingImports]

    texts = TEXTS[:2]
    theirs = IncrementalLMScorer(folder, device="cpu").word_score_tokenized(
        texts,
        tokenize_function=str.split,
        surprisal=True,
        base_two=True,
        bos_token=True,
        bow_correction=True,
    )
    begins = [i for i, token in enumerate(lm.byte_vocab) if token.startswith(b" ")]
    for text, expected in zip(texts, theirs, strict=True):
        words = surprisal_sync(lm, text)
        ids = [i for own in words for i in own.token_ids]
        told = lm.score_with_sync([lm.tokenizer.bos_token_id], [*ids, ids[0]], groups=[begins])
        ends, place = told.log_masses[:, 0].tolist(), 0
        for own, (_, value) in zip(words, expected, strict=True):
            stop = place + len(own.token_ids)
            logprob = float(told.logprobs[place:stop].double().sum())
            logprob += ends[stop] - (ends[place] if place else 0)
            assert -logprob / math.log(2) == pytest.approx(value, abs=2e-3)
            assert own.surprisal == pytest.approx(value, abs=1)
            place = stop


def test_tokens_have_the_surprisals_of_the_package_of_that_name(lm, folder):
    from surprisal import AutoHuggingFaceModel  # pyright: ignore[reportMissingImports]

    model = AutoHuggingFaceModel.from_pretrained(folder, model_class="causal")
    ends = lm.tokenizer.eos_token_id
    begin = lm.tokenizer.bos_token_id
    for text in TEXTS:
        (theirs,) = model.surprise(text)
        found = surprisal_sync(lm, text, by="token", unit="nats")
        ids = [own.token_ids[0] for own in found]
        told = lm.score_with_sync([begin], ids, groups=[[ends]])
        # They leave out the token that ends a text, and divide by the probability of the others.
        values = [
            own.surprisal + math.log1p(-math.exp(end))
            for own, (end,) in zip(found, told.log_masses.tolist(), strict=True)
        ]
        assert theirs.surprisals.tolist() == pytest.approx(values, abs=1e-3)
