"""Peaked distributions over real vocabularies, every node checked in float64."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest

from genlm_backend import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie, TokenCharacterTrie
from tests.trie import vocabularies

VOCABULARIES = [
    pytest.param("smollm2", marks=pytest.mark.real),
    "tekken",
    "deepseek",
]


class Prefixes:
    """The tokens in alphabetical order; those below a prefix are consecutive."""

    def __init__(self, vocab):
        words = [bytes(token) for token in vocab]
        self.order = sorted(range(len(words)), key=words.__getitem__)
        intervals = {}
        for rank, token in enumerate(self.order):
            word = words[token]
            for length in range(len(word) + 1):
                first, _ = intervals.get(word[:length], (rank, None))
                intervals[word[:length]] = (first, rank + 1)
        self.prefixes = list(intervals)
        self.first, self.end = np.array(list(intervals.values())).T

    def sums(self, ws):
        """In float64 without differences of running sums, which would lose small masses."""
        ws = np.append(ws.astype(np.float64)[self.order], 0.0)
        bounds = np.stack([self.first, self.end], 1).ravel()
        return np.add.reduceat(ws, bounds)[::2]

    def maxima(self, ws):
        ws = np.append(ws[self.order], -np.inf)
        bounds = np.stack([self.first, self.end], 1).ravel()
        return np.maximum.reduceat(ws, bounds)[::2]


def nodes_of(trie, prefixes):
    found = {b"": trie.root}
    for prefix in sorted(prefixes, key=len):
        if prefix:
            found[prefix] = trie.children[found[prefix[:-1]]][prefix[-1]]
    return [found[prefix] for prefix in prefixes]


def logprobs_of(vocab, seed, spread):
    """As peaked as a model's: a few tokens have nearly all of the mass."""
    logits = np.random.default_rng(seed).normal(0, spread, len(vocab))
    return (logits - np.logaddexp.reduce(logits)).astype(np.float32)


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.timeout(300)
async def test_weights_of_every_node_match_a_float64_reference(name):
    vocab = getattr(vocabularies, name)()
    reference = Prefixes(vocab)
    sequential = TokenCharacterTrie(vocab)
    parallel = ParallelTokenCharacterTrie(vocab, device="cpu")
    assert sequential.num_nodes == len(reference.prefixes) + len(vocab)
    nodes = nodes_of(sequential, reference.prefixes)
    log_batch = np.stack([logprobs_of(vocab, seed, spread) for seed, spread in enumerate([3, 8])])
    batch = np.exp(log_batch)
    assert batch.max() > 0.05
    for trie in (sequential, parallel):
        sums, maxima = trie.batch_weight_sum(batch), trie.batch_weight_max(log_batch)
        log_sums = trie.batch_log_weight_sum(log_batch)
        for i in range(len(batch)):
            expected = reference.sums(batch[i])
            np.testing.assert_allclose(sums[i][nodes], expected, rtol=1e-5, atol=1e-37)
            np.testing.assert_array_equal(maxima[i][nodes], reference.maxima(log_batch[i]))
            with np.errstate(divide="ignore"):
                expected = np.log(reference.sums(np.exp(log_batch[i].astype(np.float64))))
            np.testing.assert_allclose(log_sums[i][nodes], expected, rtol=1e-6, atol=1e-5)
        for row, ws in zip(sums, batch, strict=True):
            np.testing.assert_array_equal(row[trie.leaves], ws)
    async with AsyncTokenCharacterTrie(sequential) as trie:
        awaited = await asyncio.gather(*map(trie.weight_sum, batch))
    np.testing.assert_array_equal(awaited, sequential.batch_weight_sum(batch))


def test_walking_the_letters_of_a_token_reaches_its_leaf():
    vocab = vocabularies.tekken()
    trie = TokenCharacterTrie(vocab)
    for position in range(0, len(vocab), 997):
        token, node = vocab[position], trie.root
        for length, letter in enumerate(token):
            node = trie.children[node][letter]
            assert bytes(trie.node2prefix[node]) == token[: length + 1]
        leaf = trie.children[node][None, position]
        assert trie.word2leaf[token.byte_string, token.token_id] == leaf
        assert trie.leaf2word[leaf] == (token.byte_string, token.token_id)


def test_a_batch_needs_no_more_memory_than_its_result():
    code = """
import resource
import numpy as np
from genlm_backend import Token, TokenCharacterTrie

rng = np.random.default_rng(0)
trie = TokenCharacterTrie([Token(i, rng.bytes(rng.integers(1, 9))) for i in range(50_000)])
batch = rng.random((100, 50_000), dtype=np.float32)
trie.batch_weight_sum(batch[:2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = trie.batch_weight_sum(batch)
more = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(more / result.nbytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=100, capture_output=True, text=True
    )
    assert float(done.stdout) < 1.15
