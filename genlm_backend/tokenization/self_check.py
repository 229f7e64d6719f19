"""The check that the tokens of each probe text spell the bytes of that text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.token import ByteVocab

PROBES: Final = (
    "Hello, world! 12345",
    "the quick (brown) fox's tail_is <b>bold</b>",
    "naïve café – “ça va”",
    "Привет, мир. 日本語のテキスト 한국어 😀",
    "x = [1, 2];\n\tprint(x)  # two spaces",
    # Runs of white space, for which many vocabularies have separate tokens.
    *(
        "a".join(space * length for length in (1, 2, 3, 4, 6, 8, 12, 16, 24, 31))
        for space in " \n\t"
    ),
    "a\r\nb\r\n\r\nc \n d\t \te",
    # Characters that hardly any vocabulary has, so that they are encoded byte by byte.
    "a\x01b\x1fc\x7fd\x85e\u0378f\u07fcg\ue000h\ufffdi\U0003fff0j\U000e0fffk\U0010fffdl",
)


def check_byte_vocab(vocab: ByteVocab) -> None:
    """Encode probe texts; raise a ``TokenizerDecodeError`` if their tokens spell other bytes."""
    for text in PROBES:
        _check(vocab, text)
    added = [f"a{text}b" for text in vocab.added_texts]
    together = "".join(added)
    ids = vocab.encode(together)
    if ids and vocab.unknown_ids.isdisjoint(ids) and _comes_back(vocab, together, ids):
        _check_printed(vocab, together, ids)
        return
    for text in added:  # one by one: skip unencodable texts, name the token at fault
        _check(vocab, text)


def _check(vocab: ByteVocab, text: str) -> None:
    ids = vocab.encode(text)
    if not ids:
        return
    _check_printed(vocab, text, ids)
    if not vocab.unknown_ids.isdisjoint(ids) or _comes_back(vocab, text, ids):
        return
    token_id = _first_difference(vocab, vocab.readings(text, ids)[0], ids)
    raise TokenizerDecodeError(
        vocab.name,
        f"the probe text {text!r} does not round-trip: its tokens spell "
        f"{b''.join(vocab.byte_strings[i] for i in ids)!r}. Pass self_check=False to "
        "decode the vocabulary anyway",
        token_id,
        vocab.spellings[token_id],
    )


def _check_printed(vocab: ByteVocab, text: str, ids: list[int]) -> None:
    """Raise an error if the declared decoder prints text other than the bytes of ``ids``."""
    if vocab.prints is None:
        return
    # For Rust tokenizers, ``_comes_back`` ignores white space. This compares it too.
    kept, printed = vocab.prints(ids)
    if _is_printed(vocab, kept, printed):
        return
    ends = range(1, len(kept) + 1)
    end = next(n for n in ends if not _is_printed(vocab, *vocab.prints(kept[:n])))
    raise TokenizerDecodeError(
        vocab.name,
        f"the tokenizer's decoder prints {printed!r} for tokens of the probe text {text!r}, but "
        f"these tokens have the bytes {b''.join(vocab.byte_strings[i] for i in kept)!r}. "
        "Pass self_check=False to decode the vocabulary anyway",
        kept[end - 1],
        vocab.spellings[kept[end - 1]],
    )


def _is_printed(vocab: ByteVocab, ids: list[int], printed: str) -> bool:
    """Whether the tokens' bytes equal the printed text, except for incomplete characters."""
    spelt = b"".join(vocab.byte_strings[token_id] for token_id in ids).decode("utf-8", "replace")
    return spelt.replace("\ufffd", "") == printed.replace("\ufffd", "")


def _comes_back(vocab: ByteVocab, text: str, ids: list[int]) -> bool:
    if any(_is_misspelt(vocab, token_id) for token_id in ids):
        return False
    spelt = b"".join(_spell(vocab, token_id) for token_id in ids)
    for expected in vocab.readings(text, ids):
        # A tokenizer without an unknown token drops characters or bytes that it cannot spell.
        shorter = () if vocab.unknown_ids else _without_unspellable(vocab, expected)
        for each in itertools.chain([expected], shorter):
            if _is_same(spelt, each if vocab.keeps_spaces else _without_spaces(each)):
                return True
    return False


def _is_same(spelt: bytes, expected: bytes) -> bool:
    """Whether the two byte strings are equal, up to a space at one end."""
    return any(
        shorter in (longer, longer.removeprefix(b" "), longer.removesuffix(b" "))
        for longer, shorter in ((spelt, expected), (expected, spelt))
    )


def _is_misspelt(vocab: ByteVocab, token_id: int) -> bool:
    """Whether the bytes of an added token differ from the model's bytes for the same id."""
    expected = vocab.bytes_of_added.get(token_id)
    return expected is not None and expected != vocab.byte_strings[token_id]


def _without_unspellable(vocab: ByteVocab, text: bytes) -> Iterator[bytes]:
    """Yield ``text`` with only the bytes that are tokens, then only the characters that are."""
    bytes_known = {piece[0] for piece in vocab.byte_strings if len(piece) == 1}
    yield bytes(byte for byte in text if byte in bytes_known)
    tokens = set(vocab.byte_strings)
    characters = (c.encode() for c in text.decode("utf-8", "ignore"))
    yield b"".join(c for c in characters if c in tokens)


def _first_difference(vocab: ByteVocab, expected: bytes, ids: list[int]) -> int:
    """Return the first id whose bytes do not continue the expected text, or else the last id."""
    expected, start = _without_spaces(expected), 0
    for token_id in ids:
        piece = _without_spaces(_spell(vocab, token_id))
        if _is_misspelt(vocab, token_id) or not expected.startswith(piece, start):
            return token_id
        start += len(piece)
    return ids[-1]


def _spell(vocab: ByteVocab, token_id: int) -> bytes:
    if token_id >= len(vocab.byte_strings):
        return b"\xff"
    piece = vocab.byte_strings[token_id]
    return piece if vocab.keeps_spaces else _without_spaces(piece)


def _without_spaces(text: bytes) -> bytes:
    return b"".join(text.split())
