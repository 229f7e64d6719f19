"""ByteVocab: the bytes of a tokenizer's ids, with what they are to be checked by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Stretch(NamedTuple):
    """A part of a text as bytes, and the ids that are to spell it.

    Attributes:
        expected: Bytes of the part.
        ids: Token ids of the part.
        is_exact: Whether the ids spell these very bytes; otherwise up to a space at either end.
    """

    expected: bytes
    ids: Sequence[int]
    is_exact: bool = False


def _as_it_is(text: str, ids: list[int]) -> Iterator[list[Stretch]]:
    yield [Stretch(text.encode(), ids)]


@dataclass(frozen=True)
class ByteVocab:
    """The bytes of each id of a tokenizer, and what the tokenizer says of the ids.

    Attributes:
        name: The tokenizer's class, for messages.
        byte_strings: Bytes of each id; empty for ids that the tokenizer does not have.
        spellings: Text of each id, as the tokenizer's own files write it; ``None`` for absent ids.
        special_ids: Ids of special tokens.
        undefined_ids: Ids below the largest that the tokenizer does not have.
        unknown_ids: Ids that stand for "not in the vocabulary".
        keeps_spaces: Whether white space survives encoding.
        encode: Function from a text to its ids without special tokens (``None`` for a text that
            it refuses), or ``None`` if the tokenizer cannot encode.
        readings: Function from a text and its ids to what the ids are to spell, in stretches, and
            in several ways: a text that the tokenizer
            rewrites, or cuts at an added token, may be read in several ways.
        prints: Function from ids to those of them whose bytes are what the declared decoder makes
            of them, and to the text that it prints for these between others; ``None`` where no
            decoder is declared.
        added_texts: Texts that come out as added tokens which are not special, some of each
            kind.
    """

    name: str
    byte_strings: list[bytes]
    spellings: Sequence[str | None]
    special_ids: frozenset[int]
    undefined_ids: frozenset[int]
    unknown_ids: frozenset[int] = frozenset()
    keeps_spaces: bool = True
    encode: Callable[[str], list[int] | None] | None = None
    readings: Callable[[str, list[int]], Iterator[list[Stretch]]] = _as_it_is
    prints: Callable[[list[int]], tuple[list[int], str]] | None = None
    added_texts: Sequence[str] = ()
