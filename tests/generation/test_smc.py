"""smc: estimates of log Z and of the texts' masses agree with exact enumeration."""

import asyncio
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from transformers import LlamaConfig

from genlm_backend import AsyncTransformer, MockAsyncLM, batched, smc, smc_sync
from genlm_backend.errors import OptionError, OptionTypeError
from genlm_backend.generation import Constraint
from genlm_backend.resampling import SCHEMES
from tests.llm import families
from tests.llm.conftest import word_tokenizer

PROMPT, N, LENGTH = [2, 1], 5, 4


@pytest.fixture(scope="module")
def word_lm():
    """A tiny Llama of four words; the first ends a text."""
    config = LlamaConfig(**{**families.COMMON, "vocab_size": 4, "eos_token_id": 0})
    with AsyncTransformer(families.of(config), word_tokenizer(4)) as lm:
        yield lm


@pytest.fixture(scope="module")
def mock_lm():
    """A mock of four words, whose rows are equal to the last bit in each run."""
    with MockAsyncLM(word_tokenizer(4), eos_token_ids=[0]) as lm:
        yield lm


def exact(lm, *, prompt=PROMPT, allowed=range(4), ends=(0,), twist=lambda ids: 0.0):
    """Return the mass of each text by enumeration: its probability times its factor."""
    found, unfinished = {}, {(): 0.0}
    for length in range(1, LENGTH + 1):
        rows = lm.batch_next_token_logprobs_sync([[*prompt, *ids] for ids in unfinished])
        following = {}
        for (ids, logprob), row in zip(unfinished.items(), rows.double().numpy(), strict=True):
            for token_id in allowed(row) if callable(allowed) else allowed:
                table = found if token_id in ends or length == LENGTH else following
                table[*ids, int(token_id)] = logprob + row[token_id]
        unfinished = following
    return {ids: math.exp(logprob + twist(list(ids))) for ids, logprob in found.items()}


def distance(values, wanted):
    """Return how many standard errors a mean of estimates is from the wanted value."""
    error = max(values.std(ddof=1) / math.sqrt(len(values)), 1e-6 * wanted)
    return abs(values.mean() - wanted) / error


def check(texts, masses, repeats):
    """Compare the estimates of independent repeats with exact masses."""
    table, weights = {}, np.exp(texts.log_weights) * repeats / len(texts.texts)
    for ids, group, weight in zip(texts.token_ids, texts.group.group_ids, weights, strict=True):
        table.setdefault(tuple(ids), np.zeros(repeats))[group] += weight
    sums, total = sum(table.values()), sum(masses.values())
    assert distance(sums, total) < 3, (sums.mean(), total)
    assert texts.log_z == pytest.approx(math.log(sums.mean()), abs=1e-9)
    np.testing.assert_allclose(np.exp(texts.group.log_z), sums, rtol=1e-9, atol=1e-300)
    assert {ids for ids, own in table.items() if own.any()} <= {*masses}
    for ids, mass in masses.items():
        if mass / total * len(texts.texts) >= 30:  # rarer ones are no normal distribution
            assert distance(table[ids], mass) < 4.5, (ids, table[ids].mean(), mass)
    # The total-variation distance; 0.4 of `spread` is expected.
    gap = sum(abs(table.get(ids, np.zeros(1)).mean() - mass) for ids, mass in masses.items()) / 2
    spread = sum(own.std(ddof=1) / math.sqrt(repeats) for own in table.values())
    assert gap < spread + sum(mass for ids, mass in masses.items() if ids not in table)


def favour(ids):
    """A factor that changes at every step."""
    return 1.1 * ids.count(1) - 0.9 * (ids[-1] == 3) - 0.3 * len(ids)


def forbid(ids):
    """No text in which 2 follows 3; and a factor of the last token."""
    return -math.inf if (3, 2) in pairwise(ids) else 0.7 * (ids[-1] == 0)


LARGEST_TWO = {"allowed": lambda row: np.argsort(row)[-2:]}
# The options of smc, and those of `exact`, which are the same by default.
CASES = {
    "plain": ({}, {}),
    "allowed": ({"allowed": {1, 2}}, {}),
    "twist": ({"twist": favour}, {}),
    "twist of zero": ({"twist": forbid, "allowed": {0, 2, 3}}, {}),
    "temperature": ({"proposal": {"temperature": 2.5}}, {}),
    "all at once": ({"proposal": {"temperature": 2}, "allowed": {0, 1, 3}, "twist": favour}, {}),
    "top_k": ({"proposal": {"top_k": 2}, "twist": favour}, LARGEST_TWO),
    "end by id": ({"ends": [2], "twist": favour}, {"ends": {2}}),
    "ends by string": ({"ends": ["3>"], "twist": favour}, {"ends": {0, 3}}),
    "no end": ({"ends": [], "twist": favour, "allowed": {1, 3}}, {"ends": ()}),
}


def estimate(lm, case, scheme, repeats, **options):
    given, different = CASES[case]
    own = {name: given[name] for name in ("allowed", "twist") if name in given} | different
    options = {"max_tokens": LENGTH, "threshold": 0.9, **given, **options}
    texts = smc_sync(lm, PROMPT, N, scheme=scheme, repeats=repeats, seed=0, **options)
    return texts, exact(lm, **own)


REPEATS = pytest.mark.parametrize("repeats", [200, pytest.param(1000, marks=pytest.mark.slow)])


@REPEATS
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", CASES)
def test_mean_estimates_are_the_exact_masses(word_lm, case, scheme, repeats):
    texts, masses = estimate(word_lm, case, scheme, repeats)
    moved = [own for own in texts.group.history if (own != np.arange(len(own))).any()]
    assert moved or case == "plain"
    check(texts, masses, repeats)


@pytest.mark.parametrize("threshold", [0, 0.5, 1])
def test_mean_estimates_of_a_mock_are_the_exact_masses_at_any_threshold(mock_lm, threshold):
    texts, masses = estimate(mock_lm, "all at once", "multinomial", 200, threshold=threshold)
    check(texts, masses, 200)


PATTERNS = {
    "[ab]*c": {"twist": lambda ids: 0.8 * len(set(ids))},
    "(a|bc)+": {"proposal": {"temperature": 1.3}},
}


def exact_of_pattern(lm, pattern, **options):
    """Return the masses of the texts of the letters a, b and c that match the pattern and end."""
    vocab, (end,) = [bytes(token) for token in lm.byte_vocab], lm.eos_token_ids
    allowed = [end, *(vocab.index(letter) for letter in (b"a", b"b", b"c"))]
    masses = exact(lm, prompt=[vocab.index(b"x")], allowed=allowed, ends={end}, **options)
    spelled = {ids: b"".join(vocab[i] for i in ids[:-1]).decode() for ids in masses}
    is_match = {ids: ids[-1] == end and re.fullmatch(pattern, spelled[ids]) for ids in masses}
    return {ids: mass for ids, mass in masses.items() if is_match[ids]}


@REPEATS
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_mean_estimates_under_a_constraint_are_the_exact_masses(byte_lm, pattern, scheme, repeats):
    constraint, options = Constraint.from_regex(byte_lm, pattern), dict(PATTERNS[pattern])
    given = {"max_tokens": LENGTH, "threshold": 0.9, "repeats": repeats, "seed": 0, **options}
    texts = smc_sync(byte_lm, "x", N, constraint=constraint, scheme=scheme, **given)
    options.pop("proposal", None)
    check(texts, exact_of_pattern(byte_lm, pattern, **options), repeats)


def test_texts_cut_by_max_tokens_under_a_constraint_have_no_weight(byte_lm):
    constraint = Constraint.from_regex(byte_lm, "[ab]*c")
    texts = smc_sync(byte_lm, "x", 40, constraint=constraint, max_tokens=3, threshold=0, seed=0)
    ends = [ids[-1] in byte_lm.eos_token_ids for ids in texts.token_ids]
    is_whole = np.array(ends) & [own.endswith("c") for own in texts.texts]
    assert 0 < is_whole.sum() < 40
    assert (texts.weights > 0).tolist() == is_whole.tolist()


def test_allowed_and_a_constraint_allow_what_both_do(byte_lm):
    constraint = Constraint.from_regex(byte_lm, "[ab]c")
    ids = {bytes(token): i for i, token in enumerate(byte_lm.byte_vocab)}
    both = {"constraint": constraint, "allowed": {ids[b"b"], ids[b"c"], *byte_lm.eos_token_ids}}
    texts = smc_sync(byte_lm, "x", 6, max_tokens=4, seed=0, **both)
    assert {*texts.texts} == {"bc"}
    (mass,) = exact_of_pattern(byte_lm, "bc").values()
    assert texts.log_z == pytest.approx(math.log(mass), abs=1e-6)


DEAD = {
    "cut": lambda lm: {"constraint": Constraint.from_regex(lm, "a{9}")},
    "twist": lambda lm: {"twist": lambda ids: -math.inf},
    "no token": lambda lm: {"constraint": Constraint.from_regex(lm, "a"), "allowed": {3, 4}},
}


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("case", DEAD)
def test_texts_that_are_all_dead_have_log_z_of_minus_infinity(byte_lm, case, repeats):
    texts = smc_sync(byte_lm, "x", 4, max_tokens=3, repeats=repeats, seed=0, **DEAD[case](byte_lm))
    assert texts.log_z == -math.inf
    assert math.isnan(texts.log_z_error)
    assert np.isneginf(texts.log_weights).all()
    assert texts.weights.tolist() == [0.0] * (4 * repeats)
    assert "log Z = -inf" in repr(texts)


def numbers(texts):
    return texts.token_ids, texts.log_weights.tolist(), texts.ess.tolist(), texts.log_z


OPTIONS = {"max_tokens": LENGTH, "twist": favour, "threshold": 0.9, "repeats": 6, "seed": 5}


def test_equal_seeds_give_equal_results_and_different_seeds_others(mock_lm):
    first, second = (smc_sync(mock_lm, PROMPT, N, **OPTIONS) for _ in range(2))
    assert numbers(first) == numbers(second)
    other = smc_sync(mock_lm, PROMPT, N, **{**OPTIONS, "seed": 6})
    assert first.token_ids != other.token_ids


def test_smc_with_a_coroutine_twist_calls_it_at_once_and_gives_the_result_of_smc_sync(mock_lm):
    running, most = 0, 0

    async def twist(ids):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return favour(ids)

    found = asyncio.run(smc(mock_lm, PROMPT, N, **{**OPTIONS, "twist": twist}))
    assert most == 6 * N
    with batched(lambda queries: [favour(ids) for ids in queries]) as critic:
        assert numbers(asyncio.run(smc(mock_lm, PROMPT, N, **{**OPTIONS, "twist": critic}))) == (
            numbers(found)
        )
        assert critic.statistics().num_batches < 6 * N
        options = {**OPTIONS, "twist": critic, "ahead": True}
        early = asyncio.run(smc(mock_lm, PROMPT, N, **options))
        assert early.token_ids == found.token_ids
        np.testing.assert_allclose(early.log_weights, found.log_weights)
    assert numbers(found) == numbers(smc_sync(mock_lm, PROMPT, N, **OPTIONS))


def test_results_have_the_attributes_that_plain_formulas_give(mock_lm):
    found = smc_sync(mock_lm, PROMPT, N, **OPTIONS)
    estimates = np.exp(found.group.log_z)
    error = estimates.std(ddof=1) / math.sqrt(6) / estimates.mean()
    assert found.log_z_error == pytest.approx(error)
    assert found.ess.shape == (LENGTH, 6)
    assert (abs(found.ess - (1 + N) / 2) <= (N - 1) / 2 + 1e-9).all()
    assert found.weights.sum() == pytest.approx(1)
    text, weight = found.most_common(1)[0]
    assert weight == pytest.approx(found.weights[[own == text for own in found.texts]].sum())


def test_repeats_share_passes(word_lm):
    num_before = word_lm.statistics().num_forwards
    smc_sync(word_lm, [3, 3, 3], N, **{**OPTIONS, "repeats": 50})
    assert 0 < word_lm.statistics().num_forwards - num_before <= LENGTH


# Values of each argument that are out of bounds, and those of a wrong type.
WRONG = {
    "lm": ([], [None]),
    "n": ([0], ["many"]),
    "max_tokens": ([0], [1.5]),
    "constraint": ([], ["a*"]),
    "allowed": ([set(), {9}], ["a"]),
    "twist": ([lambda _: math.nan, lambda _: math.inf], [3, lambda _: None, lambda _: [1, 2]]),
    "proposal": ([], [3, [], {"temprature": 2}, {"allowed": [1]}]),
    "ends": ([[True], "", [9]], [1.5]),
    "threshold": ([1.5, math.nan], ["low"]),
    "scheme": (["best"], []),
    "repeats": ([0], [True]),
    "seed": ([-1], [1.5]),
    "ahead": ([True], [1]),
    "progress": ([], [1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_raises_an_error_that_names_it(word_lm, name):
    for values, error in zip(WRONG[name], (OptionError, OptionTypeError), strict=True):
        for value in values:
            given = {"lm": word_lm, "prompt": PROMPT, "n": N, "max_tokens": 3, name: value}
            with pytest.raises(error, match=rf"\b{name}\b"):
                smc_sync(**given)
