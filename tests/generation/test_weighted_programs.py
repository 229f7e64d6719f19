"""Programs that weigh texts, the documented ones among them, against every text there is."""

import ast
import asyncio
import importlib.util
import itertools
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import transformers as tf
from tokenizers import Tokenizer, models

from genlm_backend import AsyncTokenCharacterTrie, MockAsyncLM, smc
from genlm_backend.errors import ConstraintViolation
from genlm_backend.generation import Constraint

ROOT = Path(__file__).parents[2]
WORDS = ["a", "b", "ab", '"', '"a', 'b"', " ", "ba", "<end>", "<stop>"]
ENDS = [WORDS.index("<end>"), WORDS.index("<stop>")]
PROMPT = [1, 0]


@pytest.fixture(scope="module")
def lm():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    words.add_special_tokens(["<end>", "<stop>"])
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    with MockAsyncLM(tokenizer, eos_token_ids=ENDS, batch_size=4000) as lm:
        yield lm


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(function):
    """A function of the guide's, as it stands there."""
    text = (ROOT / "docs" / "constraints.md").read_text()
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.S) if f"def {function}" in b)
    wanted = (ast.Import, ast.ImportFrom, ast.AsyncFunctionDef)
    body = [node for node in ast.parse(block).body if isinstance(node, wanted)]
    names = {}
    exec(compile(ast.Module(body, []), function, "exec"), names)
    return names[function]


def probabilities(lm, texts):
    """How probable it is that the model writes each text, in whatever tokens, and ends it."""
    found = defaultdict(float)

    def go_on(ids, text, probability):
        row = lm.next_token_logprobs_sync([*PROMPT, *ids]).double().exp().tolist()
        if text in texts:
            found[text] += probability * sum(row[end] for end in ENDS)
        for token_id, word in enumerate(WORDS):
            if token_id not in ENDS and any(whole.startswith(text + word) for whole in texts):
                go_on([*ids, token_id], text + word, probability * row[token_id])

    go_on([], "", 1.0)
    return dict(found)


def check(expected, weighted):
    """Compare exact probabilities with texts and their log-weights, as a sampler has them."""
    weights = np.exp([log_weight for _, log_weight in weighted])
    total = sum(expected.values())
    assert np.log(weights.mean()) == pytest.approx(np.log(total), abs=0.1)
    for text, probability in expected.items():
        share = sum(w for w, (own, _) in zip(weights, weighted, strict=True) if own == text)
        assert share / weights.sum() == pytest.approx(probability / total, abs=0.04), text
    unknown = sum(w for w, (own, _) in zip(weights, weighted, strict=True) if own not in expected)
    assert unknown / weights.sum() < 0.01  # of texts that are too long to have been looked at


LANGUAGES = [["a", "ab"], ["ab", "ba", "abab"], ["a", "aa", "aaa", "b"], ["ab"]]


@pytest.mark.parametrize("texts", LANGUAGES, ids=str)
async def test_particle_loop_of_the_guide_matches_exact_probabilities(lm, texts):
    """Some of them can go on where they may end, and some cannot."""
    particles, first = documented("particles"), Constraint.from_choice(lm, texts)
    constraints = [first.fork() for _ in range(3000)]
    log_weights = await particles(lm, PROMPT, constraints, np.random.default_rng(0))
    written = ["".join(WORDS[i] for i in own.token_ids[:-1]) for own in constraints]
    check(probabilities(lm, texts), list(zip(written, log_weights, strict=True)))


def factor(ids):
    """The logarithm of a factor that prefers texts with an "a", and few tokens."""
    return 1.5 * ("a" in "".join(WORDS[i] for i in ids)) - 0.3 * len(ids)


WAYS = {
    "plain": {},
    "never resampled": {"threshold": 0},
    "always resampled": {"threshold": 1},
    "a flatter proposal": {"proposal": {"temperature": 1.7}},
    "a factor": {"twist": factor},
    "all": {"twist": factor, "proposal": {"temperature": 0.8}, "threshold": 1},
}


def weighed(lm, expected, given):
    """Exact probabilities by ids or by texts, times the factor that a sampler has."""
    if "twist" not in given:
        return expected
    return {ids: p * np.exp(given["twist"](ids)) for ids, p in expected.items()}


@pytest.mark.parametrize("given", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("values", [["a", "ab"], ["ab", "aba", "b", ""]], ids=str)
async def test_smc_example_matches_exact_probabilities_of_a_schema(lm, values, given):
    constraint = Constraint.from_json_schema(lm, {"enum": values})
    texts, expected = {f'"{value}"' for value in values}, {}

    def go_on(ids, log_probability):
        text = "".join(WORDS[i] for i in ids)
        row = lm.next_token_logprobs_sync([*PROMPT, *ids]).double()
        for end in ENDS if text in texts else ():
            expected[(*ids, end)] = np.exp(log_probability + float(row[end]))
        for i in range(len(WORDS) - 2):
            if any(whole.startswith(text + WORDS[i]) for whole in texts):
                go_on((*ids, i), log_probability + float(row[i]))

    go_on((), 0.0)
    options = {"max_tokens": 12, "constraint": constraint, "seed": 0, **given}
    group = await example("smc").smc(lm, PROMPT, 3000, **options)
    assert group.is_done.all()
    assert constraint.token_ids == []  # the particles have forks of it
    expected, ids = weighed(lm, expected, given), [tuple(own) for own in group.token_ids()]
    check(expected, list(zip(ids, group.log_weights, strict=True)))
    assert group.log_z == pytest.approx(np.log(sum(expected.values())), abs=0.1)


async def test_smc_example_gives_log_z_minus_inf_if_no_particle_finishes(lm):
    constraint = Constraint.from_choice(lm, ["ab", "b"])
    unended = await example("smc").smc(lm, PROMPT, 200, max_tokens=1, constraint=constraint, seed=0)
    assert unended.log_z == -np.inf
    assert not unended.is_done.any()


async def test_smc_without_any_finished_particle_gives_log_z_minus_inf(lm):
    only_a = [*(i for i, word in enumerate(WORDS) if word == "a"), *ENDS]
    options = {"constraint": Constraint.from_choice(lm, ["ab", "b"]), "seed": 0}
    dead = await smc(lm, PROMPT, 200, max_tokens=5, **options, allowed=np.array(only_a))
    assert dead.log_z == -np.inf
    assert set(dead.log_weights) == {-np.inf}
    unended = await smc(lm, PROMPT, 200, max_tokens=1, **options)
    assert unended.log_z == -np.inf
    assert not unended.group.is_done.any()


async def test_dead_particles_reduce_log_z_by_their_share(lm):
    """The second token has to be the first one again, which is not allowed behind an "a"."""

    def twist(ids):
        return -np.inf if ids[0] == WORDS.index("a") and len(ids) > 1 else 0.0

    allowed = np.array([WORDS.index("a"), WORDS.index("b")])
    options = {"max_tokens": 2, "allowed": allowed, "seed": 0, "twist": twist}
    group = await example("smc").smc(lm, PROMPT, 4000, **options)
    row = lm.next_token_logprobs_sync(PROMPT).exp()
    behind = lm.next_token_logprobs_sync([*PROMPT, int(allowed[1])]).exp()
    expected = float(row[allowed[1]] * behind[allowed].sum())
    assert np.exp(group.log_z) == pytest.approx(expected, rel=0.1)
    alive = group[group.log_weights > -np.inf]
    assert {ids[0] for ids in alive.token_ids()} == {allowed[1]}


async def test_importance_sampling_example_matches_exact_probabilities(lm):
    allowed = np.array([not set(word) & set('"<') for word in WORDS])
    expected = defaultdict(float)
    for ids in itertools.product(np.flatnonzero(allowed).tolist(), repeat=2):
        scores = await lm.score(PROMPT, ids)
        expected["".join(WORDS[i] for i in ids)] += float(scores.sum().exp())
    sis = example("sis")
    runs = (sis.particle(lm, PROMPT, 2, allowed, seed) for seed in range(3000))
    check(expected, [(text, weight) for weight, text in await asyncio.gather(*runs)])


async def test_lipogram_example_matches_exact_probabilities(lm):
    """Of "a" and blanks alone: up to the first blank behind one letter, wherever tokens end."""
    lipogram, allowed, expected = example("lipogram"), {ord("a"), ord(" ")}, defaultdict(float)

    def go_on(ids, text, probability):
        row = lm.next_token_logprobs_sync([*PROMPT, *ids]).double().exp().tolist()
        for token_id, word in enumerate(WORDS[: min(ENDS)]):
            whole = text + word
            ending = next((n for n, x in enumerate(whole) if x == " " and n >= 2), None)
            if not set(whole[:ending].encode()) <= allowed:
                continue
            if ending is not None:
                expected[whole[:ending]] += probability * row[token_id]
            elif probability * row[token_id] > 1e-7:  # it may go on without a blank for ever
                go_on([*ids, token_id], whole, probability * row[token_id])

    go_on([], "", 1.0)
    tokens = [token for token in lm.byte_vocab if token.token_id not in lm.special_ids]
    particles = [lipogram.Particle(PROMPT) for _ in range(2000)]
    random = np.random.default_rng(0)
    async with AsyncTokenCharacterTrie.from_vocab(tokens) as trie:
        while active := [particle for particle in particles if not particle.is_done]:
            await asyncio.gather(*(p.step(lm, trie, allowed, 2, random) for p in active))
    check(expected, [(p.text.decode(), p.log_weight) for p in particles])


@pytest.mark.parametrize("bos", ["a", "ab"])
async def test_scoring_example_begins_with_the_tokenizers_bos(bos):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, bos_token=bos, eos_token="<end>")
    with MockAsyncLM(tokenizer) as lm:
        total, bits = await example("scoring").score(lm, "b")
        row = await lm.next_token_logprobs([WORDS.index(bos)])
    assert total == pytest.approx(float(row[WORDS.index("b")]), abs=1e-6)
    assert bits == pytest.approx(-total / np.log(2))


# -------------------------------------------------------------------- the wrong loops


async def test_restrict_after_the_end_raises_constraint_violation(lm):
    constraint, row = Constraint.from_choice(lm, ["a", "ab"]), await lm.next_token_logprobs([1])
    constraint.advance(0)
    assert constraint.can_end
    assert not constraint.must_end
    closed = constraint.fork()
    closed.advance(1)
    assert closed.must_end
    assert closed.can_end
    assert not closed.is_ended
    for one in (constraint, closed):
        one.advance(ENDS[0])
        assert one.is_ended
        assert not one.must_end
        with pytest.raises(ConstraintViolation, match="the text has ended: no token can follow"):
            one.restrict(row)
