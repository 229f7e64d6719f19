"""Compiles a tokenizer's decoder to a function from a token to its bytes in mid-text.

The stages implement the ``decoders`` module of Hugging Face's tokenizers library, without its
effects on the first or last token of a text; a CTC decoder is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

TextOrBytes = str | bytes
Stage = Callable[[str], TextOrBytes]
"""A step that decodes one token; if a step returns bytes, later steps do not change them."""


class UnknownDecoderError(ValueError):
    """A decoder's effect on a single token cannot be determined; the message gives the reason."""


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each of the 256 characters of byte-level BPE."""
    # GPT-2's table (Radford et al., 2019): a printable Latin-1 character other than the space
    # means the byte of its code; the characters from U+0100 onwards mean the other 68, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_ALPHABET: Final = byte_level_alphabet()
_OUTSIDE: Final = 256
_CODES: Final = np.full(max(map(ord, _ALPHABET)) + 2, _OUTSIDE, dtype=np.uint16)
_CODES[[ord(character) for character in _ALPHABET]] = [*_ALPHABET.values()]
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


def decode_byte_level(strings: Sequence[str]) -> list[bytes]:
    """Return the bytes of byte-level tokens; a token with other characters is encoded as UTF-8."""
    points = np.frombuffer("".join(strings).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes = _CODES[np.minimum(points, len(_CODES) - 1)]
    ends = np.cumsum(np.fromiter(map(len, strings), dtype=np.int64, count=len(strings)))
    buffer = codes.astype(np.uint8).tobytes()
    result = [buffer[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]
    for index in np.unique(np.searchsorted(ends, np.flatnonzero(codes == _OUTSIDE), side="right")):
        result[index] = to_utf8(strings[int(index)])
    return result


def to_utf8(piece: TextOrBytes) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class CompiledDecoder:
    """A decoder as a function of one token in the middle of a text."""

    stages: tuple[Stage, ...]
    is_byte_level: bool = False
    reads_bytes: bool = False
    keeps_spaces: bool = True

    def decode(self, strings: Sequence[str]) -> list[bytes]:
        if self.is_byte_level:
            return decode_byte_level(strings)
        pieces: list[TextOrBytes] = list(strings)
        for stage in self.stages:
            pieces = [piece if isinstance(piece, bytes) else stage(piece) for piece in pieces]
        return [to_utf8(piece) for piece in pieces]

    def with_byte_fallback(self) -> CompiledDecoder:
        """Return the decoder, with a first stage added if none reads ``<0xNN>`` as a byte."""
        if _byte_fallback in self.stages:
            return self
        return dataclasses.replace(self, stages=(_byte_fallback, *self.stages), is_byte_level=False)

    def with_word_ends(self, suffix: str) -> CompiledDecoder:
        """Return a decoder like this one that decodes a token's word-end ``suffix`` as a space."""

        def stage(piece: str) -> bytes:
            text = piece.removesuffix(suffix)
            return self.decode([text])[0] + b" " * (text != piece)

        return CompiledDecoder((stage,), reads_bytes=self.reads_bytes, keeps_spaces=False)


def compile_decoder(state: dict[str, Any]) -> CompiledDecoder:
    flat = _flatten(state)
    kinds = [stage.get("type") for stage in flat]
    stages: list[Stage] = []
    joiner = None  # kind of the stage that has joined all tokens to one string
    for stage, kind in zip(flat, kinds, strict=True):
        if kind == "Fuse":
            joiner = joiner or kind
            continue
        if joiner is not None and kind == "Strip":
            continue  # strips the ends of the whole text, and changes no token in the middle
        compiled = _compile_stage(stage)
        # Replacing single characters has the same result before and after the tokens are joined.
        is_of_parts = kind == "Replace" and len(stage["pattern"].get("String", "")) == 1
        if joiner is not None and not (joiner == "Fuse" and is_of_parts):
            raise UnknownDecoderError(
                f"the decoder has a {kind} stage after {joiner}, which joins the tokens to one "
                "string, so that a token's bytes depend on the tokens beside it"
            )
        stages.append(compiled)
        if kind == "ByteLevel":
            joiner = kind
    return CompiledDecoder(
        stages=tuple(stages),
        is_byte_level="ByteLevel" in kinds and len(stages) == 1,
        reads_bytes="ByteLevel" in kinds,
        keeps_spaces=not {"WordPiece", "BPEDecoder"} & set(kinds),
    )


def infer_decoder(
    pre_tokenizer: dict[str, Any] | None, normalizer: dict[str, Any] | None, model: dict[str, Any]
) -> CompiledDecoder:
    """Infer the decoder of a tokenizer that declares none, from its other components."""
    splitters = _flatten(pre_tokenizer) if pre_tokenizer else []
    kinds = {stage.get("type") for stage in splitters}
    if "ByteLevel" in kinds:
        return compile_decoder({"type": "ByteLevel"})
    if model.get("end_of_word_suffix"):
        return compile_decoder({"type": "BPEDecoder", "suffix": model["end_of_word_suffix"]})
    drops_spaces = kinds & {
        "Whitespace",
        "WhitespaceSplit",
        "BertPreTokenizer",
        "CharDelimiterSplit",
    }
    if model.get("type") == "WordPiece" or (
        drops_spaces and model.get("continuing_subword_prefix")
    ):
        prefix = model.get("continuing_subword_prefix") or "##"
        return compile_decoder({"type": "WordPiece", "prefix": prefix, "cleanup": True})
    stages = [_compile_stage(stage) for stage in splitters if stage.get("type") == "Metaspace"]
    for stage in reversed(_flatten(normalizer) if normalizer else []):
        if (stage.get("pattern") or {}).get("String") == " " and stage.get("content"):
            # Undo the normalizer's replacement of a space with "▁" or byte-level BPE's "Ġ".
            stages.append(_replace(stage["content"], " "))
        elif stage.get("type") == "ByteLevel":
            return compile_decoder({"type": "ByteLevel"})
    if model.get("byte_fallback"):
        stages.append(_byte_fallback)
    if drops_spaces and not stages:
        if model.get("type") == "WordLevel":
            return CompiledDecoder((lambda piece: " " + piece,), keeps_spaces=False)
        raise UnknownDecoderError(
            "the tokenizer has no decoder, and its pre-tokenizer drops white space between words"
        )
    return CompiledDecoder(tuple(stages))


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state.get("type") != "Sequence":
        return [state]
    parts = state.get("decoders") or state.get("normalizers") or state.get("pretokenizers") or []
    return [leaf for part in parts for leaf in _flatten(part)]


def _compile_stage(stage: dict[str, Any]) -> Stage:
    kind = stage.get("type")
    if kind == "ByteLevel":
        return lambda piece: decode_byte_level([piece])[0]
    if kind == "ByteFallback":
        return _byte_fallback
    if kind == "Metaspace":
        return _replace(stage.get("replacement") or "▁", " ")
    if kind == "Replace":
        pattern = stage.get("pattern") or {}
        if "String" in pattern:
            return _replace(pattern["String"], stage.get("content", ""))
        return _replace_regex(pattern.get("Regex", ""), stage.get("content", ""))
    if kind == "Strip":
        return _strip(stage.get("content", " "), stage.get("start", 0), stage.get("stop", 0))
    if kind == "WordPiece":
        return _word_piece(stage.get("prefix", "##"), bool(stage.get("cleanup", True)))
    if kind == "BPEDecoder":
        return _replace(stage.get("suffix", "</w>"), " ")
    if kind == "CTC":
        raise UnknownDecoderError("a CTC decoder merges repeated tokens, so a token's bytes vary")
    raise UnknownDecoderError(f"the decoder has a stage of the unknown type {kind!r}")


def _replace(old: str, new: str) -> Stage:
    return lambda piece: piece.replace(old, new)


def _replace_regex(pattern: str, new: str) -> Stage:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UnknownDecoderError(
            f"the decoder has the pattern {pattern!r}, which Python cannot compile: {error}"
        ) from error
    return lambda piece: compiled.sub(lambda _: new, piece)


def is_byte_token(piece: str) -> bool:
    """Whether a token spelt ``piece`` is a byte (``<0xNN>``) under byte fallback."""
    return _BYTE_TOKEN.match(piece) is not None


def _byte_fallback(piece: str) -> TextOrBytes:
    is_byte = len(piece) == 6 and is_byte_token(piece)
    return bytes([int(piece[3:5], 16)]) if is_byte else piece


def _strip(content: str, start: int, stop: int) -> Stage:
    def stage(piece: str) -> str:
        piece = piece[min(start, len(piece) - len(piece.lstrip(content))) :]
        return piece[: len(piece) - min(stop, len(piece) - len(piece.rstrip(content)))]

    return stage


_CLEANUP: Final = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _word_piece(prefix: str, cleanup: bool) -> Stage:
    def stage(piece: str) -> str:
        text = piece[len(prefix) :] if piece.startswith(prefix) else " " + piece
        if cleanup:
            for spaced, tidy in _CLEANUP:
                text = text.replace(spaced, tidy)
        return text

    return stage
