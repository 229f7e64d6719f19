"""Does a byte vocabulary give back the texts that its tokenizer encodes?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.byte_vocab import ByteVocab

PROBES: Final = (
    "Hello, world! 12345",
    "the quick (brown) fox's tail_is <b>bold</b>",
    "naïve café – “ça va”",
    "Привет, мир. 日本語のテキスト 한국어 😀",
    "x = [1, 2];\n\tprint(x)  # two spaces",
)


def check_byte_vocab(vocab: ByteVocab) -> None:
    """Encode a few probe texts and compare the joined bytes with the text.

    Equal means equal up to one leading space, the tokenizer's normaliser, and (for
    vocabularies that never see it) white space. A character that the tokenizer cannot spell
    makes it skip the character, or else the probe says nothing and is passed over. About a
    millisecond.

    Raises:
        TokenizerDecodeError: Naming the first token at fault.
    """
    if vocab.encode is None:
        return
    for text in PROBES:
        ids = vocab.encode(text)
        if ids is None or vocab.unknown_ids.intersection(ids):
            continue
        if (position := first_difference(vocab, text, ids)) is not None:
            token_id = ids[position]
            raise TokenizerDecodeError(
                vocab.name,
                f"the probe text {text!r} does not come back: its tokens spell "
                f"{b''.join(vocab.byte_strings[i] for i in ids)!r}. Pass self_check=False to "
                "decode the vocabulary all the same",
                token_id,
                vocab.spellings[token_id],
            )


def first_difference(vocab: ByteVocab, text: str, ids: list[int]) -> int | None:
    """Return the index in ``ids`` of the first token that does not continue ``text``."""
    expected = vocab.normalize(text).encode()
    if not vocab.keeps_spaces:
        expected = _without_spaces(expected)
    elif not expected.startswith(b" ") and ids and _spell(vocab, ids[0]).startswith(b" "):
        expected = b" " + expected
    position = _mismatch(vocab, expected, ids)
    if position is None or _mismatch(vocab, expected.removeprefix(b" "), ids) is None:
        return None
    if not vocab.unknown_ids:
        # Without a token for the unknown, a tokenizer leaves out what it cannot spell.
        for spellable in _without_unspellable(vocab, expected):
            if _mismatch(vocab, spellable, ids) is None:
                return None
    return position


def _without_unspellable(vocab: ByteVocab, text: bytes) -> Iterator[bytes]:
    """``text`` without the bytes, and without the characters, that no token consists of."""
    bytes_known = {piece[0] for piece in vocab.byte_strings if len(piece) == 1}
    yield bytes(byte for byte in text if byte in bytes_known)
    tokens = set(vocab.byte_strings)
    characters = (c.encode() for c in text.decode("utf-8", "ignore"))
    yield b"".join(c for c in characters if c in tokens)


def _mismatch(vocab: ByteVocab, expected: bytes, ids: list[int]) -> int | None:
    start = 0
    for position, token_id in enumerate(ids):
        piece = _spell(vocab, token_id)
        if expected[start : start + len(piece)] != piece:
            return position
        start += len(piece)
    return None if start == len(expected) else max(0, len(ids) - 1)


def _spell(vocab: ByteVocab, token_id: int) -> bytes:
    if token_id >= len(vocab.byte_strings):
        return b"\xff"
    piece = vocab.byte_strings[token_id]
    return piece if vocab.keeps_spaces else _without_spaces(piece)


def _without_spaces(text: bytes) -> bytes:
    return b"".join(text.split())
