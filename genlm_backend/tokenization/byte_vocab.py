"""ByteVocab: the bytes of a tokenizer's ids, with what they are to be checked by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


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
    readings: Callable[[str, list[int]], list[bytes]] = lambda text, ids: [text.encode()]
    prints: Callable[[list[int]], tuple[list[int], str]] | None = None
    added_texts: Sequence[str] = ()
    bytes_of_added: Mapping[int, bytes] = field(default_factory=dict)
