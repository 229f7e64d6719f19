"""The entries of a vocabulary: how they are spelled, and what tells them apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from genlm_backend.errors import VocabularyError, VocabularyTypeError
from genlm_backend.tokenization import Token


def spell(decode: Iterable[Any]) -> tuple[list[bytes], list[Any]]:
    """Return each entry as bytes, four for the code of each letter, and the letter of each code.

    The order of the bytes is that of the codes. Letters are numbered as they come, after the
    bytes, so that a byte is its own code.

    Raises:
        VocabularyTypeError: (``TypeError``) If an entry is no iterable of hashable letters.
    """
    code_of: dict[Hashable, int] = {letter: letter for letter in range(256)}
    words = []
    for position, item in enumerate(decode):
        try:
            codes = [code_of.setdefault(letter, len(code_of)) for letter in item]
        except TypeError as error:
            raise VocabularyTypeError(
                f"decode[{position}] is {item!r}: every entry of a vocabulary is an iterable of "
                f"hashable letters, such as bytes or a string ({error})"
            ) from error
        words.append(np.array(codes, ">u4").tobytes())
    return words, list(code_of)


def keys_of(decode: Iterable[Any]) -> list[Hashable]:
    """Return the key of each entry: ``(bytes, token_id)``, or the entry itself."""
    return [
        (item.byte_string, item.token_id) if isinstance(item, Token) else item for item in decode
    ]


def check_unique(decode: Sequence[Any]) -> None:
    """Raise a ``VocabularyError`` where two entries have the same key."""
    is_ordinary = all(type(item) is Token for item in decode)
    if is_ordinary and len({item.token_id for item in decode}) == len(decode):
        return  # without making a key of each token
    seen: dict[Hashable, int] = {}
    for position, key in enumerate(keys_of(decode)):
        try:
            first = seen.setdefault(key, position)
        except TypeError as error:
            raise VocabularyTypeError(
                f"decode[{position}] is {key!r}, which is not hashable; pass a tuple"
            ) from error
        if first != position:
            raise VocabularyError(
                f"decode[{first}] and decode[{position}] are the same entry, {key!r}; entries "
                f"that spell the same bytes are told apart by their ids, as Tokens"
            )
