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
        ([b"a", 7], TypeError, r"decode\[1\] must be an iterable of hashable letters, .* got 7"),
        (["a", None], TypeError, r"decode\[1\] must .* got None"),
        (["a", ([],)], TypeError, r"decode\[1\] must .* got \(\[\],\) .*unhashable"),
        (["a", ["b"]], TypeError, r"decode\[1\] is \['b'\], which is not hashable: pass a tuple"),
        ([b"a", b"b", b"a"], ValueError, r"decode\[0\] and decode\[2\] are the same entry, b'a'"),
        (["a", "a"], ValueError, "same entry, 'a'"),
        ([Token(1, b"a"), Token(1, b"a")], ValueError, r"same entry, \(b'a', 1\)"),
        ("abc", TypeError, "decode must be a list of tokens, got 'abc'"),
        (7, TypeError, "decode must be a list of tokens, got 7"),
    ],
)
def test_invalid_vocabulary_raises_value_or_type_error(make, decode, kind, message):
    with pytest.raises(kind, match=message) as caught:
        make(decode)
    assert isinstance(caught.value, GenlmBackendError)


def test_the_same_id_with_other_bytes_is_another_entry(make):
    trie = make([Token(1, b"a"), Token(1, b"b")])
    assert set(trie.word2leaf) == {(b"a", 1), (b"b", 1)}


METHODS = ["weight_sum", "weight_max", "log_weight_sum", "mass_sum"]
WRONG = [
    (np.zeros(3), ValueError, r"shape \[2\], one per token, got \[3\]"),
    (torch.zeros(1), ValueError, r"shape \[2\], one per token, got \[1\]"),
    (np.zeros((4, 2)), ValueError, r"got \[4, 2\]; .* name begins with batch_"),
    (1.0, ValueError, r"got \[\]"),
    (np.zeros(2, complex), TypeError, "real numbers, got an array of complex128"),
    (torch.zeros(2, dtype=torch.complex64), TypeError, "torch.complex64"),
    (torch.zeros(2).to_sparse(), TypeError, "torch.sparse_coo"),
    (["a", "b"], TypeError, "real numbers, got an array of <U1"),
    ([[1.0], [1.0, 2.0]], TypeError, "must be an array of real numbers"),
    (None, TypeError, "real numbers, got an array of object"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("ws", "kind", "message"), WRONG)
def test_weights_of_wrong_shape_or_type_raise_errors(make, method, ws, kind, message):
    trie = make([b"a", b"b"])
    with pytest.raises(kind, match=message) as caught:
        getattr(trie, method)(ws)
    assert isinstance(caught.value, GenlmBackendError)
    if method != "mass_sum":
        with pytest.raises(kind):
            getattr(trie, f"batch_{method}")([np.zeros(2), ws])


def test_batches_of_wrong_shape_or_type_raise_errors(make):
    trie = make([b"a", b"b"])
    with pytest.raises(ValueError, match=r"weights must have shape \[batch, 2\], .*, got \[2\]"):
        trie.batch_weight_sum(np.zeros(2))
    with pytest.raises(ValueError, match=r"batch of weights must .* got \[1, 1, 2\]"):
        trie.batch_weight_max(torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match=r"shape \[batch, 2\], .*, got \[4, 3\]"):
        trie.batch_weight_sum(np.zeros((4, 3)))
    with pytest.raises(TypeError, match="sequence of rows, got 7"):
        trie.batch_weight_sum(7)


def test_invalid_options_raise_errors_that_name_them():
    with pytest.raises(ValueError, match="num_threads must be an integer of 1 or more, got 0"):
        TokenCharacterTrie([b"a"], num_threads=0)
    with pytest.raises(ValueError, match="spare_bytes must be an integer of 0 or more, got -1"):
        TokenCharacterTrie([b"a"], spare_bytes=-1)
    with pytest.raises(ValueError, match="unknown trie backend 'paralel'; known are parallel, seq"):
        AsyncTokenCharacterTrie.from_vocab([b"a"], backend="paralel")
    with pytest.raises(TypeError, match="for a vocabulary, use from_vocab"):
        AsyncTokenCharacterTrie([b"a"])
    with pytest.raises(TypeError, match="num_thread"):
        AsyncTokenCharacterTrie.from_vocab([b"a"], backend="sequential", num_thread=2)
