"""Readers of the bytes of every token id, one for each supported kind of tokenizer object."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.rust_reader import read_rust
from genlm_backend.tokenization.token import ByteVocab


def read_byte_vocab(tokenizer: Any) -> ByteVocab:
    """Read the bytes of every id from ``tokenizer``, with the reader for its kind."""
    name = type(tokenizer).__name__
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None and type(tokenizer).__module__.split(".")[0] == "tokenizers":
        rust = tokenizer
    if rust is not None:
        return read_rust(tokenizer, rust, name)
    if (mistral := _mistral_tokenizer(tokenizer)) is not None:
        return _read_mistral(mistral, name)
    if _is_sentencepiece(tokenizer):
        return _read_sentencepiece(tokenizer, name)
    if _is_sentencepiece(getattr(tokenizer, "sp_model", None)):
        return _read_slow_sentencepiece(tokenizer, tokenizer.sp_model, name)
    if (encoding := _tiktoken_encoding(tokenizer)) is not None:
        return _read_tiktoken(tokenizer, encoding, name)
    for attribute in ("idx2token", "decoder"):
        table = getattr(tokenizer, attribute, None)
        if not isinstance(table, Mapping) or not table:
            continue
        if all(isinstance(value, bytes) for value in table.values()):
            return _read_table(tokenizer, table, name, _plain_encode(tokenizer))
    if isinstance(byte_decoder := getattr(tokenizer, "byte_decoder", None), Mapping):
        return _read_slow(tokenizer, name, _alphabet_bytes(byte_decoder))
    if name == "ByT5Tokenizer":
        return _read_slow(tokenizer, name, lambda token: bytes([ord(token)]))
    hint = ": load a model by name with load_model_by_name" if isinstance(tokenizer, str) else ""
    hint = ": use the model's byte_vocab" if hasattr(tokenizer, "byte_vocab") else hint
    raise TokenizerDecodeError(
        name,
        "the tokenizer has no Rust backend, SentencePiece model, tiktoken encoding or byte table "
        f"to read the bytes of a token from{hint}",
    )


# -------------------------------------------------------------------- mistral-common


def _mistral_tokenizer(tokenizer: Any) -> Any | None:
    """Return the mistral-common tokenizer that the object is or wraps; ``None`` without one."""
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


def _piece_bytes(piece: str, is_byte: bool) -> bytes:
    return bytes([int(piece[3:5], 16)]) if is_byte else piece.replace("▁", " ").encode()


def _read_slow_sentencepiece(tokenizer: Any, model: Any, name: str) -> ByteVocab:
    def has_piece(piece: str) -> bool:
        return model.id_to_piece(model.piece_to_id(piece)) == piece

    def to_bytes(piece: str) -> bytes:
        return _piece_bytes(piece, model.is_byte(model.piece_to_id(piece)) and has_piece(piece))

    return _read_slow(tokenizer, name, to_bytes, model.decode, has_piece)


def _read_sentencepiece(model: Any, name: str) -> ByteVocab:
    ids = range(model.get_piece_size())
    pieces = [model.id_to_piece(i) for i in ids]
    special_ids = frozenset(i for i in ids if model.is_control(i) or model.is_unknown(i))
    byte_strings = [
        piece.encode() if i in special_ids else _piece_bytes(piece, model.is_byte(i))
        for i, piece in enumerate(pieces)
    ]
    return ByteVocab(
        name,
        byte_strings,
        [*pieces],
        special_ids,
        frozenset(),
        frozenset({model.unk_id()}),
        encode=lambda text: model.encode(text),
        readings=lambda text, ids: [model.decode(ids).encode()],
    )


# -------------------------------------------------------------------- tiktoken


def _tiktoken_encoding(tokenizer: Any) -> Any | None:
    """Return a tiktoken encoding (the object itself or one of its attributes), or ``None``."""
    tiktoken = sys.modules.get("tiktoken")
    if tiktoken is None:  # not imported, so the object cannot hold an encoding
        return None
    candidates = (tokenizer, *getattr(tokenizer, "__dict__", {}).values())
    return next((each for each in candidates if isinstance(each, tiktoken.Encoding)), None)


def _read_tiktoken(tokenizer: Any, encoding: Any, name: str) -> ByteVocab:
    table: dict[int, bytes] = {}
    for token_id in range(encoding.n_vocab):
        try:
            table[token_id] = encoding.decode_single_token_bytes(token_id)
        except KeyError:  # the id has no token
            continue
    special_ids = [encoding.encode_single_token(token) for token in encoding.special_tokens_set]
    encode = partial(encoding.encode, disallowed_special=())
    return _read_table(tokenizer, table, name, encode, special_ids)


# -------------------------------------------------------------------- tables and slow classes


def _read_table(
    tokenizer: Any,
    table: Mapping[int, bytes],
    name: str,
    encode: Callable[[str], list[int] | None],
    special_ids: Iterable[int] = (),
) -> ByteVocab:
    size = max(table) + 1
    byte_strings = [table.get(i, b"") for i in range(size)]
    return ByteVocab(
        name,
        byte_strings,
        [_spelling(table[i]) if i in table else None for i in range(size)],
        frozenset([*special_ids, *getattr(tokenizer, "all_special_ids", ())]),
        frozenset(range(size)) - frozenset(table),
        encode=encode,
    )


def _plain_encode(tokenizer: Any) -> Callable[[str], list[int] | None]:
    """Return a tokenizer's ``encode``, with ``add_special_tokens=False`` if it has that option."""
    encode = getattr(tokenizer, "encode", lambda text: None)
    if "add_special_tokens" in inspect.signature(encode).parameters:
        return partial(encode, add_special_tokens=False)
    return encode


def _alphabet_bytes(table: Mapping[str, int]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()

    return to_bytes


def _read_slow(
    tokenizer: Any,
    name: str,
    to_bytes: Callable[[str], bytes],
    decode: Callable[[list[str]], str] | None = None,  # in place of convert_tokens_to_string
    is_of_model: Callable[[str], bool] = lambda token: False,  # whether the model has the token
) -> ByteVocab:
    """Read a slow tokenizer (written in Python); ``to_bytes`` maps its tokens to bytes."""
    to_text = decode or tokenizer.convert_tokens_to_string
    added = tokenizer.added_tokens_decoder
    size = max([*tokenizer.get_vocab().values(), *added]) + 1
    special_ids = set(tokenizer.all_special_ids)
    special_ids.update(token_id for token_id, token in added.items() if token.special)
    # Added tokens that the model lacks spell their content: ``to_bytes`` does not apply to them.
    literals = {i: token.content for i, token in added.items() if not is_of_model(token.content)}
    if decode is not None:  # SentencePiece: some classes print "▁" in added tokens as a space
        for token_id in literals.keys() - special_ids:
            literals[token_id] = _between_others(tokenizer, literals[token_id])
    byte_strings, spellings = [], []
    for token_id in range(size):
        spelling = tokenizer.convert_ids_to_tokens(token_id)
        spellings.append(spelling)
        if spelling is None:
            byte_strings.append(b"")
        elif token_id in literals or token_id in special_ids:
            byte_strings.append(literals.get(token_id, spelling).encode())
        else:
            byte_strings.append(to_bytes(spelling))
    unknown_id = tokenizer.unk_token_id

    def readings(text: str, ids: list[int]) -> list[bytes]:
        parts = []
        for is_added, group in itertools.groupby(ids, (special_ids | literals.keys()).__contains__):
            tokens = tokenizer.convert_ids_to_tokens(run := list(group))
            part = "".join(map(literals.get, run, tokens)) if is_added else to_text(tokens)
            # Decoding drops the space at the beginning of the group's first token.
            is_short = byte_strings[run[0]].startswith(b" ") and not part.startswith(" ")
            parts.append(" " * is_short + part)
        return [text.encode(), "".join(parts).encode()]

    return ByteVocab(
        name,
        byte_strings,
        spellings,
        frozenset(special_ids),
        frozenset(i for i, spelling in enumerate(spellings) if spelling is None),
        frozenset() if unknown_id is None else frozenset({unknown_id}),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        readings=readings,
        added_texts=[token.content for i, token in added.items() if i not in special_ids],
    )


def _between_others(tokenizer: Any, token: str) -> str:
    """Return the text that decoding prints for ``token`` between two other tokens."""
    text = tokenizer.convert_tokens_to_string(["a", token, "a"])
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "a" else token


def _spelling(byte_string: bytes) -> str:
    return byte_string.decode("utf-8", "backslashreplace")
