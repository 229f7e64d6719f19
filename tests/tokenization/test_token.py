import copy
import operator
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend import Token


def test_token_is_bytes_with_a_token_id():
    token = Token(7, b"ab")
    assert isinstance(token, bytes)
    assert (token.token_id, token.byte_string, len(token), token[0]) == (7, b"ab", 2, 97)
    assert type(token.byte_string) is bytes
    assert b"".join([Token(1, b"a"), Token(2, b""), Token(3, b"c")]) == b"ac"
    assert token.decode() == "ab"
    assert repr(token) == "Token(token_id=7, byte_string=b'ab')"
    assert eval(repr(token)) == token
    assert Token(np.int64(5), b"").token_id == 5


def test_equality_hash_and_order_follow_the_token_id():
    assert Token(1, b"a") == Token(1, b"b")
    assert Token(1, b"a") != Token(2, b"a")
    assert len({Token(1, b"a"), Token(2, b"a"), Token(1, b"z")}) == 2
    tokens = [Token(3, b"a"), Token(1, b"c"), Token(2, b"b")]
    assert [t.token_id for t in sorted(tokens)] == [1, 2, 3]
    assert Token(1, b"z") < Token(2, b"a") <= Token(2, b"") >= Token(0, b"x")
    assert Token(3, b"") > Token(2, b"zz")


COMPARISONS = [
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


@pytest.mark.parametrize("compare", COMPARISONS)
@given(token_id=st.integers(0, 300), spelling=st.binary(max_size=2), other=st.binary(max_size=2))
def test_token_is_compared_with_plain_bytes_by_its_bytes(compare, token_id, spelling, other):
    token = Token(token_id, spelling)
    assert compare(token, other) is compare(spelling, other)
    assert compare(other, token) is compare(other, spelling)
    assert compare(token, bytearray(other)) is compare(spelling, bytearray(other))


@pytest.mark.parametrize("compare", COMPARISONS)
@given(ids=st.tuples(*[st.integers(0, 3)] * 2), spellings=st.tuples(*[st.binary(max_size=2)] * 2))
def test_two_tokens_are_compared_by_their_ids(compare, ids, spellings):
    first, second = map(Token, ids, spellings)
    assert compare(first, second) is compare(*ids)
    assert hash(first) == hash(ids[0])


def test_token_is_unequal_to_non_bytes_and_not_ordered_with_them():
    token = Token(1, b"a")
    for other in ("a", 1, None, (b"a",)):
        assert token != other
        assert other != token
        with pytest.raises(TypeError):
            token < other  # noqa: B015


def test_plain_bytes_are_found_in_lists_but_not_in_sets_of_tokens():
    token = Token(1, b"a")
    assert b"a" not in {token}
    assert token not in {b"a": 1}
    assert b"a" in [token]
    assert [token, Token(2, b"b")].index(b"b") == 1
    assert sorted([Token(0, b"b"), b"a", b"c"]) == [b"a", b"b", b"c"]


def test_token_survives_pickling_and_copying():
    token = Token(9, b"\xff\x00")
    for other in (pickle.loads(pickle.dumps(token)), copy.copy(token), copy.deepcopy(token)):
        assert type(other) is Token
        assert (other.token_id, other.byte_string) == (9, b"\xff\x00")


@pytest.mark.parametrize(
    "arguments", [("1", b"a"), (1.0, b"a"), (True, b"a"), (None, b"a"), (1, "a"), (1, None), (1, 5)]
)
def test_wrong_argument_types_raise_type_error(arguments):
    with pytest.raises(TypeError, match="must be"):
        Token(*arguments)


def test_as_bytes_and_is_plain_bytes_distinguish_tokens_from_bytes():
    assert Token.as_bytes(Token(1, b"a")) == b"a"
    assert type(Token.as_bytes(Token(1, b"a"))) is bytes
    assert Token.as_bytes(b"b") == b"b"
    assert Token.is_plain_bytes(b"a")
    assert not Token.is_plain_bytes(Token(1, b"a"))
    assert not Token.is_plain_bytes("a")
