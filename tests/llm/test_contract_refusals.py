"""What every backend refuses, before anything is queued."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from genlm_backend.errors import AdapterError, UnknownAdapterError
from tests.llm.families import VOCAB

BAD = [
    ([], ValueError, "empty"),
    (np.array([], dtype=np.int64), ValueError, "empty"),
    ([1, True], TypeError, "True"),
    ([1, 2.0], TypeError, "2.0"),
    ([1, "2"], TypeError, "'2'"),
    ([1, None], TypeError, "None"),
    (["ab"], TypeError, "'ab'"),
    ("text", TypeError, "encode the text"),
    (b"text", TypeError, "encode the text"),
    (5, TypeError, "5"),
    (None, TypeError, "None"),
    (torch.tensor([[1, 2]]), TypeError, r"one dimension.*: pass \w+\[0\], the only row"),
    (torch.ones(2, 2, dtype=torch.int64), TypeError, r"a single row, such as \w+\[0\]"),
    ([[1, 2]], TypeError, r"pass \w+\[0\], the only row"),
    ({"input_ids": [1, 2]}, TypeError, "pass its 'input_ids'$"),
    ({1: 2}, TypeError, "got a dict$"),
    ({1, 2}, TypeError, "must be ordered, got a set"),
    (
        {"input_ids": torch.tensor([[1, 2]])},
        TypeError,
        r"pass its input_ids\[0\], the only row",
    ),
    (BatchEncoding({"input_ids": [[1, 2]]}), TypeError, r"BatchEncoding: pass its input_ids\[0\]"),
    (np.array([1.0, 2.0]), TypeError, "1.0"),
    (torch.tensor([True, False]), TypeError, "True"),
    ([0, VOCAB], ValueError, f"token id {VOCAB} .* {VOCAB} ids"),
    ([-1], ValueError, "token id -1"),
]


@pytest.mark.parametrize(("context", "kind", "message"), BAD, ids=lambda x: repr(x)[:20])
async def test_bad_input_is_refused_before_anything_is_queued(
    lm, backend, close, context, kind, message
):
    good = asyncio.ensure_future(lm.next_token_logprobs([3, 4]))
    await asyncio.sleep(0)
    before = lm.statistics().num_awaits
    with pytest.raises(kind, match=message):
        await lm.next_token_logprobs(context)
    with pytest.raises(kind, match=rf"^token_ids_list\[1\]: .*{message}"):
        await lm.batch_next_token_logprobs([[1], context])
    with pytest.raises(kind, match=message):
        lm.next_token_logprobs_sync(context)
    with pytest.raises(kind, match=message):
        lm.batch_next_token_logprobs_sync([[1], context])
    assert lm.statistics().num_awaits == before
    close(await good, backend.expected([3, 4]))


async def test_batch_methods_refuse_a_single_context(lm):
    before = lm.statistics().num_awaits
    for one in ([1, 2], (1,), np.array([1, 2]), torch.tensor([1, 2]), lm.context([1, 2])):
        with pytest.raises(TypeError, match="token_ids_list must be a list of contexts, got one"):
            await lm.batch_next_token_logprobs(one)
        with pytest.raises(TypeError, match="got one context: put it into a list"):
            lm.batch_next_token_logprobs_sync(one)
        with pytest.raises(TypeError, match="prompt_token_ids_list must be a list of contexts"):
            await lm.batch_sample(one, 3, [])
    with pytest.raises(ValueError, match=r"\[continuation\] \* len\(prompts\)"):
        await lm.batch_score([[1], [2]], [[1]])
    assert [len(scores) for scores in await lm.batch_score(iter([1, 2]), [[1], [2, 3]])] == [1, 2]
    before = lm.statistics().num_awaits
    with pytest.raises(ValueError, match="outside the vocabulary"):
        await lm.batch_sample([[1], [2], [10**9]], 3, [])
    assert lm.statistics().num_awaits == before


def test_a_context_beyond_the_maximum_is_refused_with_both_lengths(backend):
    with backend.make(max_length=6) as lm:
        lm.next_token_logprobs_sync([1] * 6)
        with pytest.raises(ValueError, match=r"7 tokens.*maximum of 6"):
            lm.next_token_logprobs_sync([1] * 7)


async def test_an_adapter_that_is_not_loaded_is_refused(lm):
    for ask, context in (
        (lm.next_token_logprobs_sync, [1]),
        (lm.batch_next_token_logprobs_sync, [[1]]),
    ):
        ask(context, lora_name=None)
        with pytest.raises(ValueError, match="'polite'"):
            ask(context, lora_name="polite")
    for ask, context in ((lm.next_token_logprobs, [1]), (lm.batch_next_token_logprobs, [[1]])):
        await ask(context, lora_name=None)
        with pytest.raises(ValueError, match="'polite'"):
            await ask(context, lora_name="polite")


def test_missing_adapters_and_set_lora_raise_adapter_error(lm):
    with pytest.raises(AdapterError, match="polite"):
        lm.add_new_lora("/nowhere/polite", "polite")
    with pytest.raises(UnknownAdapterError, match="'polite'"):
        lm.remove_lora("polite")
    with pytest.raises(AdapterError, match="lora_name="):
        lm.set_lora("/nowhere/polite", "polite")
    with pytest.raises(AdapterError, match="lora_name="):
        lm.clear_lora()
    assert not lm.next_token_logprobs_sync([1]).isnan().any()
