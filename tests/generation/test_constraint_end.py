"""What ends a text under a constraint, where the token that does is an ordinary one too."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, models

from genlm_backend import MockAsyncLM
from genlm_backend.errors import ConstraintViolation
from genlm_backend.generation import Constraint, generate

WORDS = ["a", "b", "\n", "ab", "a\n", "\nb", "\n\n", "end"]
BREAK, END = WORDS.index("\n"), WORDS.index("end")


@pytest.fixture(scope="module")
def lm():
    words = {word: i for i, word in enumerate(WORDS)}
    with MockAsyncLM(Tokenizer(models.WordLevel(words, unk_token="a"))) as lm:
        assert [token.byte_string.decode() for token in lm.byte_vocab] == WORDS
        yield lm


LANGUAGES = [
    ["a\nb"],
    ["a"],
    ["a", "a\n", "a\n\n"],
    ["\n", "\na", "b\n"],
    ["ab", "a\nb\n", "a\n\nb", "end"],
]


@pytest.mark.parametrize("eos", [[BREAK], [BREAK, END], [END], [0, BREAK]], ids=str)
@pytest.mark.parametrize("texts", LANGUAGES, ids=repr)
def test_mask_and_advance_agree_when_eos_tokens_are_ordinary_text(lm, texts, eos):
    """A token is text where the language goes on with it; otherwise it may end a whole text."""
    for seed in range(15):
        randomness = random.Random(seed)
        constraint, text = Constraint.from_choice(lm, texts, eos_token_ids=eos), ""
        while True:
            going_on = {
                i for i, w in enumerate(WORDS) if any(t.startswith(text + w) for t in texts)
            }
            ends = set(eos) if text in texts else set()
            assert set(constraint.mask().nonzero().flatten().tolist()) == going_on | ends
            assert set(constraint.mask(may_end=False).nonzero().flatten().tolist()) == going_on
            assert constraint.can_end == (text in texts)
            assert constraint.must_end == (not going_on)
            for wrong in set(range(len(WORDS))) - going_on - ends:
                with pytest.raises(ConstraintViolation):
                    constraint.fork().advance(wrong)
            chosen = randomness.choice(sorted(going_on | ends))
            constraint.advance(chosen)
            assert constraint.is_ended == (chosen not in going_on)
            if constraint.is_ended:
                break
            text += WORDS[chosen]
        assert text in texts
        assert not constraint.mask().any()


@pytest.mark.parametrize("eos", [[BREAK], [BREAK, END], [0]], ids=str)
@pytest.mark.parametrize("texts", LANGUAGES, ids=repr)
async def test_constrained_texts_are_complete_and_report_finish_reason(lm, texts, eos):
    choice = {"type": "choice", "choice": texts}
    found = await generate(
        lm, [0], do_sample=True, seed=0, n=25, max_new_tokens=9, eos_token_id=eos,
        response_format=choice,
    )  # fmt: skip
    for generation in found:
        written = "".join(WORDS[i] for i in generation.token_ids)
        if generation.finish_reason == "eos":
            assert generation.token_ids[-1] in eos
            written = "".join(WORDS[i] for i in generation.token_ids[:-1])
        assert generation.text == written
        assert written in texts
    reasons = {generation.finish_reason for generation in found}
    assert reasons <= ({"stop"} if texts == ["a\nb"] or texts == ["a"] else {"stop", "eos"})


@pytest.mark.parametrize("field", ["min_new_tokens", "min_length"])
async def test_minimum_length_forbids_ending_but_not_eos_tokens_as_text(lm, field):
    """Lines of "a" and line breaks, which end a text where nothing else is possible."""
    lines = {"type": "regex", "regex": "(a\n){3}b?"}
    least = {field: 8 + (field == "min_length")}
    for (found,) in [
        await generate(
            lm, [0], do_sample=True, seed=seed, max_new_tokens=12, eos_token_id=BREAK,
            response_format=lines, **least,
        )
        for seed in range(12)
    ]:  # fmt: skip
        assert found.text == "a\na\na\nb"
    endings = [
        await generate(
            lm, [0], do_sample=True, seed=seed, max_new_tokens=12, eos_token_id=END,
            response_format=lines,
        )
        for seed in range(12)
    ]  # fmt: skip
    assert {found.text for (found,) in endings} == {"a\na\na\n", "a\na\na\nb"}


def test_a_grammar_may_name_the_token_that_ends_texts():
    words = {word: i for i, word in enumerate(["a", "<|im_end|>", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    with MockAsyncLM(tokenizer) as lm:
        constraint = Constraint.from_grammar(
            lm, 'start: "a" <|im_end|> "b"', eos_token_ids=[words["<|im_end|>"]]
        )
        for token_id in (0, 1, 2):
            assert constraint.mask().nonzero().flatten().tolist() == [token_id]
            constraint.advance(token_id)
        assert constraint.can_end
        assert not constraint.is_ended


def test_every_tokenization_of_a_choice_is_allowed(lm):
    """Brute force over all sequences of up to four tokens."""
    texts = ["ab\n", "a\nb", "a\n\nb"]
    for tokens in itertools.product(range(len(WORDS)), repeat=4):
        constraint, text = Constraint.from_choice(lm, texts, eos_token_ids=[END]), ""
        for token_id in tokens:
            text += WORDS[token_id]
            is_right = any(t.startswith(text) for t in texts)
            try:
                constraint.advance(token_id)
            except ConstraintViolation:
                assert not is_right or token_id == END
                break
            if token_id == END:
                assert text.removesuffix("end") in texts
                break
            assert is_right
