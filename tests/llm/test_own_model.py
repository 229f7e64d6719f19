"""A model of one's own that defines the two methods it has to."""

import asyncio

import pytest
import torch

from genlm_backend import AsyncLM
from genlm_backend.errors import AdapterError
from tests.llm.conftest import word_tokenizer


class Counting(AsyncLM):
    """Says that the next token is the length of the context."""

    async def next_token_logprobs(self, token_ids, lora_name=None):
        await asyncio.sleep(0)
        return self.next_token_logprobs_sync(token_ids)

    def next_token_logprobs_sync(self, token_ids, lora_name=None):
        self.check_adapter(lora_name)
        row = torch.full((len(self.byte_vocab),), -torch.inf)
        row[len(list(token_ids))] = 0
        return row


async def test_every_other_method_is_there():
    async with Counting(word_tokenizer()) as lm:
        rows = await lm.batch_next_token_logprobs([[1], [1, 2, 3]])
        assert rows.argmax(-1).tolist() == [1, 3]
        assert torch.equal(rows, lm.batch_next_token_logprobs_sync([[1], [1, 2, 3]]))
        assert (await lm.batch_next_token_logprobs([])).shape == (0, len(lm.byte_vocab))
        assert await lm.sample([5, 5], 3, [], seed=1) == [2, 3, 4]
        assert await lm.batch_sample([[5], [5, 5]], 2, [3]) == [[1, 2], [2]]
        assert int((await lm.next_token_logits([0])).argmax()) == 1
        with pytest.raises(AdapterError, match="Counting takes no LoRA adapters"):
            lm.add_new_lora("somewhere")
        lm.clear_cache()
        assert lm.statistics().num_awaits == 0
