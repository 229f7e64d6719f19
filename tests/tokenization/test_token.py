import copy
import operator
import pickle

import numpy as np
import pytest

from genlm_backend import Token


def test_it_is_bytes_that_know_an_id():
    token = Token(7, b"ab")
    assert isinstance(token, bytes)
    assert (token.token_id, token.byte_string, len(token), token[0]) == (7, b"ab", 2, 97)
    assert type(token.byte_string) is bytes
    assert b"".join([Token(1, b"a"), Token(2, b""), Token(3, b"c")]) == b"ac"
    assert token.decode() == "ab"
    assert repr(token) == "Token(7, b'ab')"
    assert Token(np.int64(5), b"").token_id == 5


def test_equality_hash_and_order_go_by_id():
    assert Token(1, b"a") == Token(1, b"b")
    assert Token(1, b"a") != Token(2, b"a")
    assert len({Token(1, b"a"), Token(2, b"a"), Token(1, b"z")}) == 2
    tokens = [Token(3, b"a"), Token(1, b"c"), Token(2, b"b")]
    assert [t.token_id for t in sorted(tokens)] == [1, 2, 3]
    assert Token(1, b"z") < Token(2, b"a") <= Token(2, b"") >= Token(0, b"x")
    assert Token(3, b"") > Token(2, b"zz")


def test_it_never_equals_plain_bytes():
    token = Token(1, b"a")
    assert operator.ne(token, b"a")
    assert operator.ne(b"a", token)
    assert not operator.eq(token, b"a")
    assert not operator.eq(b"a", token)
    assert b"a" not in {token}
    assert token not in {b"a": 1}
    with pytest.raises(TypeError):
        sorted([token, b"a"])


def test_it_pickles_and_copies():
    token = Token(9, b"\xff\x00")
    for other in (pickle.loads(pickle.dumps(token)), copy.copy(token), copy.deepcopy(token)):
        assert type(other) is Token
        assert (other.token_id, other.byte_string) == (9, b"\xff\x00")


@pytest.mark.parametrize(
    "arguments", [("1", b"a"), (1.0, b"a"), (True, b"a"), (None, b"a"), (1, "a"), (1, None), (1, 5)]
)
def test_wrong_types_are_refused(arguments):
    with pytest.raises(TypeError, match="must be"):
        Token(*arguments)


def test_helpers_for_what_may_be_a_token():
    assert Token.as_bytes(Token(1, b"a")) == b"a"
    assert type(Token.as_bytes(Token(1, b"a"))) is bytes
    assert Token.as_bytes(b"b") == b"b"
    assert Token.is_plain_bytes(b"a")
    assert not Token.is_plain_bytes(Token(1, b"a"))
    assert not Token.is_plain_bytes("a")
