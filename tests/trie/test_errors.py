"""What is wrong is told, with what was given and the way out."""

import numpy as np
import pytest
import torch

from genlm_backend import AsyncTokenCharacterTrie, Token, TokenCharacterTrie
from genlm_backend.errors import GenlmBackendError
from tests.trie.test_tries import KINDS


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


@pytest.mark.parametrize(
    ("decode", "kind", "message"),
    [
        ([], ValueError, "at least one token; got none"),
        ([b"a", 7], TypeError, r"decode\[1\] is 7: every entry .* iterable of hashable letters"),
        (["a", None], TypeError, r"decode\[1\] is None"),
        (["a", ([],)], TypeError, r"decode\[1\] is \(\[\],\): every .*unhashable"),
        (["a", ["b"]], TypeError, r"decode\[1\] is \['b'\], which is not hashable; pass a tuple"),
        ([b"a", b"b", b"a"], ValueError, r"decode\[0\] and decode\[2\] are the same entry, b'a'"),
        (["a", "a"], ValueError, "same entry, 'a'"),
        ([Token(1, b"a"), Token(1, b"a")], ValueError, r"same entry, \(b'a', 1\)"),
        ("abc", TypeError, "decode is a list of tokens, not 'abc'"),
        (7, TypeError, "decode is a list of tokens, not 7"),
    ],
)
def test_vocabularies_that_no_trie_can_be_built_over(make, decode, kind, message):
    with pytest.raises(kind, match=message) as caught:
        make(decode)
    assert isinstance(caught.value, GenlmBackendError)


def test_the_same_id_with_other_bytes_is_another_entry(make):
    trie = make([Token(1, b"a"), Token(1, b"b")])
    assert set(trie.word2leaf) == {(b"a", 1), (b"b", 1)}


METHODS = ["weight_sum", "weight_max", "log_weight_sum", "mass_sum"]
WRONG = [
    (np.zeros(3), ValueError, r"shape \[3\] for a vocabulary of 2 tokens"),
    (torch.zeros(1), ValueError, r"shape \[1\] for a vocabulary of 2 tokens"),
    (np.zeros((4, 2)), ValueError, r"shape \[4, 2\] .* name begins with batch_"),
    (1.0, ValueError, r"shape \[\]"),
    (np.zeros(2, complex), TypeError, "real numbers, got an array of complex128"),
    (torch.zeros(2, dtype=torch.complex64), TypeError, "torch.complex64"),
    (torch.zeros(2).to_sparse(), TypeError, "torch.sparse_coo"),
    (["a", "b"], TypeError, "real numbers, got an array of <U1"),
    ([[1.0], [1.0, 2.0]], TypeError, "must be an array of real numbers"),
    (None, TypeError, "real numbers, got an array of object"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("ws", "kind", "message"), WRONG)
def test_weights_that_do_not_fit(make, method, ws, kind, message):
    trie = make([b"a", b"b"])
    with pytest.raises(kind, match=message) as caught:
        getattr(trie, method)(ws)
    assert isinstance(caught.value, GenlmBackendError)
    if method != "mass_sum":
        with pytest.raises(kind):
            getattr(trie, f"batch_{method}")([np.zeros(2), ws])


def test_batches_that_do_not_fit(make):
    trie = make([b"a", b"b"])
    with pytest.raises(ValueError, match=r"weights of shape \[2\] .* it must be \[batch, 2\]"):
        trie.batch_weight_sum(np.zeros(2))
    with pytest.raises(ValueError, match=r"batch of weights of shape \[1, 1, 2\]"):
        trie.batch_weight_max(torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match=r"shape \[4, 3\] for a vocabulary of 2"):
        trie.batch_weight_sum(np.zeros((4, 3)))
    with pytest.raises(TypeError, match="sequence of them, not 7"):
        trie.batch_weight_sum(7)


def test_options_that_make_no_sense():
    with pytest.raises(ValueError, match="num_threads must be an integer of 1 or more, got 0"):
        TokenCharacterTrie([b"a"], num_threads=0)
    with pytest.raises(ValueError, match="spare_bytes must be an integer of 0 or more, got -1"):
        TokenCharacterTrie([b"a"], spare_bytes=-1)
    with pytest.raises(ValueError, match="unknown trie backend 'paralel'; there are parallel, seq"):
        AsyncTokenCharacterTrie.from_vocab([b"a"], backend="paralel")
    with pytest.raises(TypeError, match="from_vocab takes a vocabulary"):
        AsyncTokenCharacterTrie([b"a"])
    with pytest.raises(TypeError, match="num_thread"):
        AsyncTokenCharacterTrie.from_vocab([b"a"], backend="sequential", num_thread=2)
