"""From a context to prefix weights, and what does not fit together."""

import asyncio
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genlm_backend import AsyncTokenCharacterTrie, MockAsyncLM, Token, TokenCharacterTrie
from genlm_backend import lm_trie_weights as weights_of
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_trie_weights
from tests.trie.reference import node_of


@pytest.fixture
def lm():
    with MockAsyncLM(word_tokenizer()) as model:
        yield model


def make(kind, vocab):
    if kind == "plain":
        return TokenCharacterTrie(vocab)
    options = {"device": "cpu", "as_tensor": True} if kind == "parallel" else {}
    return AsyncTokenCharacterTrie.from_vocab(vocab, backend=kind, **options)


@pytest.mark.parametrize("kind", ["plain", "sequential", "parallel"])
async def test_weights_of_prefixes_sum_the_models_row(lm, kind):
    trie = make(kind, lm.byte_vocab)
    for operation in ("sum", "max", "log_sum"):
        rows = await asyncio.gather(
            *(weights_of(lm, trie, [i % 3, 1], operation) for i in range(10))
        )
        for i, found in enumerate(rows):
            row = lm.next_token_logprobs_sync([i % 3, 1]).double().numpy()
            assert isinstance(found, torch.Tensor) == (kind == "parallel")
            tree = trie if kind == "plain" else trie.trie
            ws = np.exp(row) if operation == "sum" else row
            expected = naive_trie_weights(lm.byte_vocab, ws, operation)
            for prefix in (b"", b"<", b"<1", b"<1>"):
                own = float(found[node_of(tree, prefix)])
                assert own == pytest.approx(expected[tuple(prefix)], rel=1e-4, abs=1e-5)
    if kind != "plain":
        trie.shutdown()


async def test_trie_over_some_tokens_in_another_order_gets_their_weights(lm):
    vocab = [lm.byte_vocab[i] for i in (7, 2, 5)]
    trie = TokenCharacterTrie(vocab)
    found = await weights_of(lm, trie, [1])
    row = lm.next_token_logprobs_sync([1]).exp()
    np.testing.assert_allclose(found[trie.leaves], row[[7, 2, 5]], rtol=1e-6)


async def test_a_trie_serves_one_model_after_another():
    with MockAsyncLM(word_tokenizer()) as one, MockAsyncLM(word_tokenizer()) as two:
        trie = TokenCharacterTrie(one.byte_vocab)
        for model in (one, two, one):
            found = await weights_of(model, trie, [1])
            np.testing.assert_allclose(
                found[trie.leaves], model.next_token_logprobs_sync([1]).exp(), rtol=1e-6
            )


async def test_pickled_trie_does_not_contain_the_model(lm):
    trie = TokenCharacterTrie(lm.byte_vocab[3:])
    alone = len(pickle.dumps(trie))
    await weights_of(lm, trie, [1])
    assert len(pickle.dumps(trie)) == alone
    copy = pickle.loads(pickle.dumps(trie))
    np.testing.assert_array_equal(await weights_of(lm, copy, [1]), await weights_of(lm, trie, [1]))


async def test_trie_that_fits_one_model_is_refused_for_a_smaller_one(lm):
    trie = TokenCharacterTrie(lm.byte_vocab)
    await weights_of(lm, trie, [1])
    with (
        MockAsyncLM(word_tokenizer(5)) as smaller,
        pytest.raises(ValueError, match="not a token of the model"),
    ):
        await weights_of(smaller, trie, [1])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (b"plain", "decode.0. of the trie is b'plain', which is not a token of the model"),
        (Token(10**6, b"x"), "is not a token of the model"),
        (Token(3, b"other"), r"but the model's token 3 is Token\(token_id=3, "),
    ],
)
async def test_trie_over_other_tokens_raises_value_error(lm, entry, message):
    with pytest.raises(ValueError, match=message):
        await weights_of(lm, TokenCharacterTrie([entry]), [1])
    assert lm.statistics().num_awaits == 0


async def test_object_without_bytes_or_rows_raises_type_error(lm):
    trie = TokenCharacterTrie(lm.byte_vocab)
    for half in ("byte_vocab", "next_token_logprobs"):
        other = SimpleNamespace(**{half: getattr(lm, half)})
        with pytest.raises(TypeError, match="must be a model such as an AsyncLM"):
            await weights_of(other, trie, [1])
