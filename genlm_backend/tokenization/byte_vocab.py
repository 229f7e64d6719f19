"""The bytes of every token id, for each kind of tokenizer object there is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.decoder import (
    CompiledDecoder,
    UnknownDecoderError,
    compile_decoder,
    infer_decoder,
)


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
        normalize: What the tokenizer makes of a text before it splits it.
    """

    name: str
    byte_strings: list[bytes]
    spellings: Sequence[str | None]
    special_ids: frozenset[int]
    undefined_ids: frozenset[int]
    unknown_ids: frozenset[int] = frozenset()
    keeps_spaces: bool = True
    encode: Callable[[str], list[int] | None] | None = None
    normalize: Callable[[str], str] = str


def read_byte_vocab(tokenizer: Any) -> ByteVocab:
    """Read the bytes of every id out of ``tokenizer``, whatever its kind.

    Raises:
        TokenizerDecodeError: If they cannot be known.
    """
    name = type(tokenizer).__name__
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None and type(tokenizer).__module__.split(".")[0] == "tokenizers":
        rust = tokenizer
    if rust is not None:
        return _read_rust(tokenizer, rust, name)
    if (mistral := _mistral_tokenizer(tokenizer)) is not None:
        return _read_mistral(mistral, name)
    if _is_sentencepiece(tokenizer):
        return _read_sentencepiece(tokenizer, name)
    if _is_sentencepiece(getattr(tokenizer, "sp_model", None)):
        return _read_slow(tokenizer, name, _sentencepiece_bytes(tokenizer.sp_model))
    if (encoding := _tiktoken_encoding(tokenizer)) is not None:
        return _read_tiktoken(tokenizer, encoding, name)
    for attribute in ("idx2token", "decoder"):
        table = getattr(tokenizer, attribute, None)
        if isinstance(table, Mapping) and table and _all_bytes(table.values()):
            return _read_table(tokenizer, table, name)
    if isinstance(byte_decoder := getattr(tokenizer, "byte_decoder", None), Mapping):
        return _read_slow(tokenizer, name, _alphabet_bytes(byte_decoder))
    if name == "ByT5Tokenizer":
        return _read_slow(tokenizer, name, lambda token: bytes([ord(token)]))
    raise TokenizerDecodeError(
        name,
        "it has no Rust backend, SentencePiece model, tiktoken encoding or byte table "
        "that could be asked for the bytes of a token",
    )


# -------------------------------------------------------------------- tokenizers (Rust)


def _read_rust(tokenizer: Any, rust: Any, name: str) -> ByteVocab:
    spellings = _rust_spellings(rust)
    try:
        decoder = _rust_decoder(rust)
    except UnknownDecoderError as error:
        token = spellings[0] if spellings else None
        raise TokenizerDecodeError(name, str(error), 0 if spellings else None, token) from error
    byte_strings = decoder.decode([spelling or "" for spelling in spellings])
    special_ids = set(getattr(tokenizer, "all_special_ids", ()))
    for token_id, added in rust.get_added_tokens_decoder().items():
        if added.special:
            special_ids.add(token_id)
        byte_strings[token_id] = _added_bytes(added, rust.normalizer, decoder)
    for token_id in special_ids:
        byte_strings[token_id] = (spellings[token_id] or "").encode()

    def encode(text: str) -> list[int] | None:
        try:
            return rust.encode(text, add_special_tokens=False).ids
        except Exception:  # all that the Rust side raises for a character it has no token for
            return None

    unknown = getattr(rust.model, "unk_token", None) or getattr(tokenizer, "unk_token", None)
    unknown_ids = {rust.token_to_id(unknown)} if unknown else _unknown_ids(encode, byte_strings)
    return ByteVocab(
        name=name,
        byte_strings=byte_strings,
        spellings=spellings,
        special_ids=frozenset(special_ids),
        undefined_ids=frozenset(i for i, spelling in enumerate(spellings) if spelling is None),
        unknown_ids=frozenset(i for i in unknown_ids if i is not None),
        keeps_spaces=decoder.keeps_spaces,
        encode=encode,
        normalize=_normalizing(rust.normalizer, decoder),
    )


def _unknown_ids(
    encode: Callable[[str], list[int] | None], byte_strings: list[bytes]
) -> set[int | None]:
    """The id that a character which no text has comes out as, unless it is spelt byte by byte.

    A Unigram model has such an id and, in Python, no attribute that tells it.
    """
    character = "\U0010fffd"
    return {
        token_id
        for token_id in encode(character) or ()
        if byte_strings[token_id].strip() and byte_strings[token_id] not in character.encode()
    }


def _normalizing(normalizer: Any, decoder: CompiledDecoder) -> Callable[[str], str]:
    """What of a text can come back: normalised, in the letters that the decoder writes."""
    if normalizer is None:
        return str
    state = json.dumps(_state(normalizer))

    def normalize(text: str) -> str:
        normalized = normalizer.normalize_str(text)
        if '"ByteLevel"' in state or (decoder.keeps_spaces and not decoder.is_byte_level):
            return decoder.decode([normalized])[0].decode("utf-8", "replace")
        return normalized

    return normalize


def _rust_spellings(rust: Any) -> list[str | None]:
    size = rust.get_vocab_size(with_added_tokens=True)
    spellings: list[str | None] = [rust.id_to_token(i) for i in range(size)]
    if None in spellings:  # there are holes, so ids go beyond the count
        largest = max(rust.get_vocab(with_added_tokens=True).values(), default=-1)
        spellings.extend(rust.id_to_token(i) for i in range(size, largest + 1))
    return spellings


def _rust_decoder(rust: Any) -> CompiledDecoder:
    if rust.decoder is not None:
        return compile_decoder(_state(rust.decoder))
    model: dict[str, Any] = {"type": type(rust.model).__name__}
    for setting in ("end_of_word_suffix", "continuing_subword_prefix", "byte_fallback"):
        model[setting] = getattr(rust.model, setting, None)
    return infer_decoder(
        _state(rust.pre_tokenizer) if rust.pre_tokenizer is not None else None,
        _state(rust.normalizer) if rust.normalizer is not None else None,
        model,
    )


def _state(part: Any) -> dict[str, Any]:
    try:
        return json.loads(part.__getstate__())
    except Exception as error:  # a component written in Python cannot be serialised
        raise UnknownDecoderError(f"{part!r} cannot be serialised: {error}") from error


def _added_bytes(added: Any, normalizer: Any, decoder: CompiledDecoder) -> bytes:
    if added.special or not added.normalized or normalizer is None:
        return added.content.encode()
    normalized = normalizer.normalize_str(added.content)
    if normalized == added.content or decoder.is_byte_level:
        return normalized.encode()
    return decoder.decode([normalized])[0]


# -------------------------------------------------------------------- mistral-common


def _mistral_tokenizer(tokenizer: Any) -> Any | None:
    """The Tekken or SentencePiece tokenizer inside whatever wraps it."""
    for _ in range(3):
        if type(tokenizer).__module__.startswith("mistral_common.tokens.tokenizers."):
            if hasattr(tokenizer, "id_to_piece"):
                return tokenizer
            tokenizer = getattr(tokenizer, "instruct_tokenizer", None) or tokenizer.tokenizer
        elif type(tokenizer).__name__.startswith("MistralCommon"):
            tokenizer = tokenizer.tokenizer
        else:
            return None
    return tokenizer if hasattr(tokenizer, "id_to_piece") else None


def _read_mistral(tokenizer: Any, name: str) -> ByteVocab:
    special_ids = frozenset(tokenizer.special_ids)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=False, eos=False)

    if not hasattr(tokenizer, "id_to_byte_piece"):
        vocab = _read_sentencepiece(tokenizer._model, name)
        for token_id in special_ids:
            vocab.byte_strings[token_id] = (vocab.spellings[token_id] or "").encode()
        return ByteVocab(**{**vocab.__dict__, "special_ids": vocab.special_ids | special_ids})
    ignore = type(tokenizer).id_to_byte_piece.__defaults__[0]  # SpecialTokenPolicy.IGNORE
    read = tokenizer.id_to_byte_piece
    byte_strings = [read(i, ignore) for i in range(tokenizer.n_words)]
    for token_id in special_ids:
        byte_strings[token_id] = tokenizer.id_to_piece(token_id).encode()
    spellings = [*map(_spelling, byte_strings)]
    return ByteVocab(
        name, byte_strings, spellings, special_ids, frozenset(), frozenset(), encode=encode
    )


# -------------------------------------------------------------------- SentencePiece


def _is_sentencepiece(model: Any) -> bool:
    return all(hasattr(model, method) for method in ("id_to_piece", "is_byte", "is_control"))


def _sentencepiece_bytes(model: Any) -> Callable[[str], bytes]:
    def to_bytes(piece: str) -> bytes:
        token_id = model.piece_to_id(piece)
        if model.is_byte(token_id) and model.id_to_piece(token_id) == piece:
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    return to_bytes


def _read_sentencepiece(model: Any, name: str) -> ByteVocab:
    ids = range(model.get_piece_size())
    pieces = [model.id_to_piece(i) for i in ids]
    special_ids = frozenset(i for i in ids if model.is_control(i) or model.is_unknown(i))
    byte_strings = []
    for token_id, piece in enumerate(pieces):
        if token_id in special_ids:
            byte_strings.append(piece.encode())
        elif model.is_byte(token_id):
            byte_strings.append(bytes([int(piece[3:5], 16)]))
        else:
            byte_strings.append(piece.replace("▁", " ").encode())
    normalize = getattr(model, "normalize", None)
    return ByteVocab(
        name,
        byte_strings,
        [*pieces],
        special_ids,
        frozenset(),
        frozenset({model.unk_id()}),
        encode=lambda text: model.encode(text),
        normalize=str if normalize is None else lambda text: normalize(text).replace("▁", " "),
    )


# -------------------------------------------------------------------- tiktoken


def _tiktoken_encoding(tokenizer: Any) -> Any | None:
    """A tiktoken encoding: the object itself, or one that it keeps."""
    tiktoken = sys.modules.get("tiktoken")
    if tiktoken is None:  # then the object cannot hold one
        return None
    for candidate in (
        (tokenizer, *vars(tokenizer).values()) if hasattr(tokenizer, "__dict__") else (tokenizer,)
    ):
        if isinstance(candidate, tiktoken.Encoding):
            return candidate
    return None


def _read_tiktoken(tokenizer: Any, encoding: Any, name: str) -> ByteVocab:
    byte_strings: list[bytes] = []
    undefined = []
    for token_id in range(encoding.n_vocab):
        try:
            byte_strings.append(encoding.decode_single_token_bytes(token_id))
        except KeyError:
            byte_strings.append(b"")
            undefined.append(token_id)
    special_ids = {encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    special_ids.update(getattr(tokenizer, "all_special_ids", ()))
    absent = frozenset(undefined)
    spellings = [
        None if i in absent else _spelling(string) for i, string in enumerate(byte_strings)
    ]
    return ByteVocab(
        name,
        byte_strings,
        spellings,
        frozenset(special_ids),
        absent,
        encode=lambda text: encoding.encode(text, disallowed_special=()),
    )


# -------------------------------------------------------------------- tables and slow classes


def _all_bytes(values: Iterable[object]) -> bool:
    return all(isinstance(value, bytes) for value in values)


def _read_table(tokenizer: Any, table: Mapping[int, bytes], name: str) -> ByteVocab:
    size = max(table) + 1
    byte_strings = [table.get(i, b"") for i in range(size)]
    return ByteVocab(
        name,
        byte_strings,
        [_spelling(table[i]) if i in table else None for i in range(size)],
        frozenset(getattr(tokenizer, "all_special_ids", ())),
        frozenset(range(size)) - frozenset(table),
        encode=getattr(tokenizer, "encode", None),
    )


def _alphabet_bytes(table: Mapping[str, int]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()

    return to_bytes


def _read_slow(tokenizer: Any, name: str, to_bytes: Callable[[str], bytes]) -> ByteVocab:
    """A tokenizer class written in Python: its tokens, spelt by ``to_bytes``."""
    added = tokenizer.added_tokens_decoder
    size = max([*tokenizer.get_vocab().values(), *added]) + 1
    special_ids = set(tokenizer.all_special_ids)
    special_ids.update(token_id for token_id, token in added.items() if token.special)
    byte_strings, spellings = [], []
    for token_id in range(size):
        spelling = tokenizer.convert_ids_to_tokens(token_id)
        spellings.append(spelling)
        if spelling is None:
            byte_strings.append(b"")
        elif token_id in special_ids or token_id in added:
            byte_strings.append(spelling.encode())
        else:
            byte_strings.append(to_bytes(spelling))
    unknown_id = tokenizer.unk_token_id
    return ByteVocab(
        name,
        byte_strings,
        spellings,
        frozenset(special_ids),
        frozenset(i for i, spelling in enumerate(spellings) if spelling is None),
        frozenset() if unknown_id is None else frozenset({unknown_id}),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def _spelling(byte_string: bytes) -> str:
    return byte_string.decode("utf-8", "backslashreplace")
