"""Constraints of random languages against brute force over a small vocabulary."""

import random
import re

import pytest
from tokenizers import Tokenizer, models

from genlm_backend import MockAsyncLM
from genlm_backend.generation import Constraint

WORDS = ["a", "b", "c", "ab", "ba", "bc", "abc", "aa", "ca", "cab", "end"]
END = WORDS.index("end")
LONGEST = 6


@pytest.fixture(scope="module")
def lm():
    words = {word: i for i, word in enumerate(WORDS)}
    with MockAsyncLM(Tokenizer(models.WordLevel(words, unk_token="a"))) as lm:
        yield lm


TEXTS = [""]
for _ in range(LONGEST):
    TEXTS += [text + letter for text in TEXTS if len(text) == len(TEXTS[-1]) for letter in "abc"]


def random_pattern(randomness, depth=3):
    """A regular expression of a finite language over three letters."""
    if depth == 0 or randomness.random() < 0.2:
        return randomness.choice(["a", "b", "c", "[ab]", "[^a]"]).replace("[^a]", "[bc]")
    one, other = (random_pattern(randomness, depth - 1) for _ in range(2))
    return randomness.choice(
        [f"{one}{other}", f"({one}|{other})", f"({one})?{other}", f"({one}){{1,2}}"]
    )


def assert_walks_are_right(lm, make, language, seed):
    """Follow random paths; each mask is what the texts of the language go on with."""
    randomness = random.Random(seed)
    for _ in range(4):
        constraint, text = make(lm), ""
        while True:
            expected = {
                i
                for i, word in enumerate(WORDS)
                if any(whole.startswith(text + word) for whole in language)
            }
            if text in language:
                expected.add(END)
            assert set(constraint.mask().nonzero().flatten().tolist()) == expected
            assert constraint.can_end == (text in language)
            chosen = randomness.choice(sorted(expected))
            constraint = randomness.choice([constraint, constraint.fork()])
            constraint.advance(chosen)
            if chosen == END:
                break
            text += WORDS[chosen]


@pytest.mark.parametrize("seed", range(40))
def test_masks_of_random_languages_match_brute_force(lm, seed):
    randomness = random.Random(seed)
    while True:
        pattern = random_pattern(randomness)
        language = {text for text in TEXTS if re.fullmatch(pattern, text)}
        # Only languages that are known as a whole, and without the empty text.
        longest = max(map(len, language), default=LONGEST)
        if language and "" not in language and longest < LONGEST:
            break
    rules = " | ".join(f'"{text}"' for text in sorted(language))
    makers = [
        lambda lm: Constraint.from_regex(lm, pattern, eos_token_ids=[END]),
        lambda lm: Constraint.from_choice(lm, language, eos_token_ids=[END]),
        lambda lm: Constraint.from_grammar(lm, f"start: {rules}", eos_token_ids=[END]),
    ]
    for make in makers:
        assert_walks_are_right(lm, make, language, seed)
