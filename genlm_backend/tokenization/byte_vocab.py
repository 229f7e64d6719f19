"""ByteVocab: what is known of a tokenizer's ids, and what they are to be checked with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Stretch(NamedTuple):
    """Bytes and the ids that are to spell them: exactly, or up to a space at either end."""

    expected: bytes
    ids: Sequence[int]
    is_exact: bool = False


def _as_it_is(text: str, ids: list[int]) -> Iterator[list[Stretch]]:
    yield [Stretch(text.encode(), ids)]


@dataclass(frozen=True)
class ByteVocab:
    """What a tokenizer says of each of its ids.

    Attributes:
        name: The tokenizer's class, for messages.
        byte_strings: By id; empty for ids that the tokenizer does not have.
        spellings: By id, as the tokenizer's own files write them; ``None`` for absent ids.
        special_ids: Ids of special tokens.
        undefined_ids: Ids below the largest that the tokenizer does not have.
        unknown_ids: Ids that stand for "not in the vocabulary".
        keeps_spaces: Whether white space survives encoding.
        encode: Text to ids without special tokens (``None`` for a text that it refuses), or
            ``None`` if the object cannot encode.
        readings: What a text's ids are to spell, in stretches: a text that the tokenizer
            rewrites, or cuts at an added token, may be read in several ways.
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
    added_texts: Sequence[str] = ()
