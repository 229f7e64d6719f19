"""Token: the bytes of a vocabulary entry with its id. ByteVocab: the bytes of all ids."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard, final

from genlm_backend.checks import instance, integer


def _by_id(compare: Callable[[int, int], bool]) -> Callable[[Token, object], bool]:
    def method(self: Token, other: object) -> bool:
        # NotImplemented makes Python fall back to the comparison of bytes.
        return (
            compare(self.token_id, other.token_id) if isinstance(other, Token) else NotImplemented
        )

    return method


@final
class Token(bytes):
    """One entry of a vocabulary: a ``bytes`` with a ``token_id``.

    Several ids may have the same bytes, so tokens compare with each other by id. A token compares
    with plain ``bytes`` by its spelling: ``token == b" the"``, ``token < b"b"``. Other operations
    are those of ``bytes``: ``b"".join(tokens)``, ``len``, indexing.

    A token is hashed by its id, so sets and dictionaries distinguish tokens of equal spelling, and
    find neither a token by plain bytes nor plain bytes by a token: ``b" the" in {token}`` is False
    although ``b" the" == token``, while ``b" the" in [token]`` is True. Look up
    ``token.byte_string`` to match by spelling. Do not mix tokens and plain bytes as keys of one
    dictionary, or in one sorted list: order by id and order by bytes are inconsistent.

    ``Token(token_id, byte_string)`` takes an integer id and the ``bytes`` that the token
    contributes in the middle of a text, which may be empty; other types raise a ``TypeError``.

    Attributes:
        token_id: Id of the token in its vocabulary.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        token_id = integer()("token_id", token_id)
        self = super().__new__(cls, instance(bytes, "bytes")("byte_string", byte_string))
        self.token_id = token_id
        return self

    @property
    def byte_string(self) -> bytes:
        """The spelling alone, as plain ``bytes``."""
        return bytes(self)

    @staticmethod
    def as_bytes(x: bytes) -> bytes:
        """Return plain ``bytes`` for a token, and anything else unchanged."""
        return bytes(x) if isinstance(x, Token) else x

    @staticmethod
    def is_plain_bytes(x: object) -> TypeGuard[bytes]:
        """Whether ``x`` is ``bytes`` and not a token."""
        return isinstance(x, bytes) and not isinstance(x, Token)

    __eq__ = _by_id(operator.eq)
    __ne__ = _by_id(operator.ne)

    def __hash__(self) -> int:
        return hash(self.token_id)

    __lt__ = _by_id(operator.lt)
    __le__ = _by_id(operator.le)
    __gt__ = _by_id(operator.gt)
    __ge__ = _by_id(operator.ge)

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={bytes(self)!r})"

    def __reduce__(self) -> tuple[type[Token], tuple[int, bytes]]:
        return type(self), (self.token_id, bytes(self))


def make_tokens(byte_strings: list[bytes]) -> list[Token]:
    """Return ``Token(i, byte_strings[i])`` for every i, without the constructor's checks."""
    new, tokens = bytes.__new__, []
    for token_id, byte_string in enumerate(byte_strings):
        token = new(Token, byte_string)
        token.token_id = token_id
        tokens.append(token)
    return tokens


@dataclass(frozen=True)
class ByteVocab:
    """The bytes of a tokenizer's ids, its special ids, and functions to check the bytes with."""

    name: str
    byte_strings: list[bytes]
    spellings: Sequence[str | None]
    special_ids: frozenset[int]
    undefined_ids: frozenset[int]
    unknown_ids: frozenset[int] = frozenset()
    keeps_spaces: bool = True
    encode: Callable[[str], list[int] | None] = lambda text: None
    readings: Callable[[str, list[int]], list[bytes]] = lambda text, ids: [text.encode()]
    prints: Callable[[list[int]], tuple[list[int], str]] | None = None
    added_texts: Sequence[str] = ()
    bytes_of_added: Mapping[int, bytes] = field(default_factory=dict)
