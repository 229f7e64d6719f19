"""The token that texts begin with: once before each text, and a warning of one of chats."""

import asyncio
import warnings
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from genlm_backend import (
    MockAsyncLM,
    continuations,
    continuations_sync,
    generate_sync,
    prefix_logprob,
    prefix_logprob_sync,
    surprisal,
    surprisal_sync,
)
from tests.scoring.vocabularies import many_ways

CHAT = [{"role": "user", "content": "ab a"}]
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
TURNS = "{% for m in messages %}{{ bos_token + m.role }} {{ m.content }}{% endfor %}"
ENDS = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
SEPARATED = "{% for m in messages %}{{ m.role }} {{ m.content + bos_token }}{% endfor %}"
BROKEN = "{{ raise_exception('no') }}"


def adding(tokenizer):
    """A tokenizer that puts its BOS before each text."""
    rust = tokenizer.backend_tokenizer
    rust.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def templated(is_added: bool) -> tuple[Any, list[int], str]:
    """A tokenizer, the token ids of a chat and its text."""
    tokenizer: Any = many_ways(chat_template=PLAIN)
    tokenizer = adding(tokenizer) if is_added else tokenizer
    ids = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert ids == [0, *tokenizer.encode("ab a", add_special_tokens=False)]
    return tokenizer, ids, tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("is_added", [True, False])
def test_prompt_that_spells_its_bos_token_gets_no_second_one(is_added):
    tokenizer, ids, text = templated(is_added)
    with MockAsyncLM(tokenizer) as lm:
        options = {"max_new_tokens": 3, "logprobs": True}
        for prompt, same in ((text, ids), ("<s>" + text, [0, *ids])):
            own, other = (generate_sync(lm, each, **options)[0].tokens for each in (prompt, same))
            assert [token.logprob for token in own] == [token.logprob for token in other]


@pytest.mark.parametrize("is_added", [True, False])
def test_context_that_spells_its_bos_token_gets_no_second_one(is_added):
    tokenizer, ids, text = templated(is_added)
    with MockAsyncLM(tokenizer) as lm:
        for context in (text, "ab a"):
            assert surprisal_sync(lm, "b", context=context).context == tuple(ids)
            assert continuations_sync(lm, context).context == tuple(ids)
            own = prefix_logprob_sync(lm, context, "b")
            assert own == prefix_logprob_sync(lm, ids, "b")
        # As many as are spelt, where they are.
        assert surprisal_sync(lm, "b", context="<s>" + text).context == (0, *ids)


def test_context_that_begins_with_eos_gets_bos_only_from_the_tokenizer():
    for tokenizer, begin in ((many_ways(), [1]), (adding(many_ways()), [0, 1])):
        with MockAsyncLM(tokenizer) as lm:
            assert surprisal_sync(lm, "b", context="</s>a").context == (*begin, 2)


ASKING = [
    lambda lm: surprisal_sync(lm, "ab"),
    lambda lm: surprisal_sync(lm, "ab", context=""),
    lambda lm: surprisal_sync(lm, "ab", context="ba"),
    lambda lm: continuations_sync(lm, None),
    lambda lm: prefix_logprob_sync(lm, "a", "b"),
]
AWAITED = [
    lambda lm: surprisal(lm, "ab"),
    lambda lm: continuations(lm, None),
    lambda lm: prefix_logprob(lm, None, "b"),
]


async def awaited(ask, lm):
    return await ask(lm)


@pytest.mark.parametrize("ask", [*ASKING, *AWAITED])
def test_bos_token_that_opens_chat_turns_warns_once(ask):
    with MockAsyncLM(many_ways(chat_template=TURNS)) as lm:
        surprisal_sync(lm, "ab", context=[0])
        surprisal_sync(lm, "ab", context="<s>a")
        with pytest.warns(UserWarning, match="'<s>', the tokenizer's bos_token.*context=") as told:
            ask(lm) if ask in ASKING else asyncio.run(awaited(ask, lm))
        assert len(told) == 1
        assert told[0].filename == __file__
        surprisal_sync(lm, "ab")


@pytest.mark.parametrize("template", [None, PLAIN, ENDS, SEPARATED, BROKEN])
def test_bos_token_of_other_chat_templates_gives_no_warning(template):
    with MockAsyncLM(many_ways(chat_template=template)) as lm, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert surprisal_sync(lm, "ab").context == (0,)
