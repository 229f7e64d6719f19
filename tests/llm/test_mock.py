import hashlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend import MockAsyncLM
from tests.llm.conftest import word_tokenizer

LM = MockAsyncLM(word_tokenizer(), row_cache_bytes=0)
contexts = st.lists(st.integers(0, 95), min_size=1, max_size=8)


@given(contexts, contexts)
def test_rows_are_equal_if_and_only_if_contexts_are(first, second):
    one, two = LM.batch_next_token_logprobs_sync([first, second])
    assert torch.equal(one, two) == (first == second)


def test_rows_are_the_same_on_every_machine_and_run():
    rows = LM.batch_next_token_logprobs_sync([[1, 2, 3], [3, 2, 1], [95] * 4000])
    digest = hashlib.sha256((rows * 1000).round().to(torch.int32).numpy().tobytes()).hexdigest()
    assert digest[:16] == "578ce0b21045f3c5"


def test_undefined_ids_have_probability_zero():
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    with MockAsyncLM(tokenizer) as lm:
        row = lm.next_token_logprobs_sync([0])
    assert row[1:5].isneginf().all()
    assert abs(float(row.exp().sum()) - 1) < 1e-6
