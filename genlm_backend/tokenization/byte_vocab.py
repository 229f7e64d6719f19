"""ByteVocab: the bytes of a tokenizer's ids, with what they are to be checked by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Stretch(NamedTuple):
    """A part of a text as bytes, and the ids that are to spell it."""

    expected: bytes
    ids: Sequence[int]
    is_exact: bool = False


def _as_it_is(text: str, ids: list[int]) -> Iterator[list[Stretch]]:
    yield [Stretch(text.encode(), ids)]


@dataclass(frozen=True)
class ByteVocab:
    """The bytes of each id of a tokenizer, and what the tokenizer says of the ids."""

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
