"""The bytes of every token id, for each kind of tokenizer object there is."""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.decoder import (
    CompiledDecoder,
    UnknownDecoderError,
    compile_decoder,
    infer_decoder,
    is_byte_token,
)

# A vocabulary may have thousands of added tokens: Gemma's has 6,400, of two kinds.
_TEXTS_OF_A_KIND: Final = 64


class Stretch(NamedTuple):
    """A text and the ids that are to spell it: exactly, or up to a space at either end."""

    text: str
    ids: Sequence[int]
    is_exact: bool = False


def _as_it_is(text: str, ids: list[int]) -> Iterator[list[Stretch]]:
    yield [Stretch(text, ids)]


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
        model = tokenizer.sp_model
        return _read_slow(tokenizer, name, _sentencepiece_bytes(model), model.decode)
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

    def encode(text: str) -> list[int] | None:
        try:
            return rust.encode(text, add_special_tokens=False).ids
        except Exception:  # all that the Rust side raises for a character it has no token for
            return None

    unheard_of, unheard_of_ids = _unheard_of(encode, spellings)
    try:
        decoder = _rust_decoder(rust)
    except UnknownDecoderError as error:
        token = spellings[0] if spellings else None
        raise TokenizerDecodeError(name, str(error), 0 if spellings else None, token) from error
    if any(is_byte_token(spellings[token_id] or "") for token_id in unheard_of_ids):
        decoder = decoder.with_byte_fallback()
    byte_strings = decoder.decode([spelling or "" for spelling in spellings])
    undefined_ids = frozenset(i for i, spelling in enumerate(spellings) if spelling is None)
    for token_id in undefined_ids:
        byte_strings[token_id] = b""
    special_ids = set(getattr(tokenizer, "all_special_ids", ()))
    model, added_tokens = rust.model, rust.get_added_tokens_decoder()
    named = set(getattr(tokenizer, "special_tokens_map", {}).values())
    added_texts: defaultdict[tuple[bool, ...], list[str]] = defaultdict(list)
    for token_id, added in added_tokens.items():
        if added.special:
            special_ids.add(token_id)
            continue
        if added.content not in named:
            # transformers lists a converted model's user-defined pieces among its special tokens.
            special_ids.discard(token_id)
        # Ids of the model come out of other texts too, as Gemma's "▁▁" out of two spaces.
        is_of_model = model.token_to_id(added.content) == token_id
        if not is_of_model:
            byte_strings[token_id] = _added_bytes(added, rust.normalizer, decoder)
        is_rewritten = byte_strings[token_id] != added.content.encode()
        flags = (added.normalized, added.lstrip, added.rstrip, added.single_word)
        texts = added_texts[(is_of_model, is_rewritten, *flags)]
        if len(texts) < _TEXTS_OF_A_KIND:
            texts.append(added.content)
            if is_rewritten:
                texts.append(rust.decode([token_id], skip_special_tokens=False))
    for token_id in special_ids:
        byte_strings[token_id] = (spellings[token_id] or "").encode()
    unknown = getattr(model, "unk_token", None) or getattr(tokenizer, "unk_token", None)
    if unknown:
        unknown_ids = {rust.token_to_id(unknown)}
    else:  # a Unigram model has such an id and, in Python, no attribute that tells it
        unknown_ids = {
            token_id
            for token_id in unheard_of_ids
            if byte_strings[token_id].strip() and byte_strings[token_id] not in unheard_of.encode()
        }
    return ByteVocab(
        name=name,
        byte_strings=byte_strings,
        spellings=spellings,
        special_ids=frozenset(special_ids),
        undefined_ids=undefined_ids,
        unknown_ids=frozenset(i for i in unknown_ids if i is not None),
        keeps_spaces=decoder.keeps_spaces,
        encode=encode,
        readings=_rust_readings(rust, decoder, added_tokens),
        added_texts=[*itertools.chain.from_iterable(added_texts.values())],
    )


def _unheard_of(
    encode: Callable[[str], list[int] | None], spellings: Sequence[str | None]
) -> tuple[str, list[int]]:
    """A character that no token has, and the ids that it comes out as."""
    for character in map(chr, range(0x10FFFD, 0, -1)):
        ids = encode(character) or []
        if not any(character in (spellings[token_id] or "") for token_id in ids):
            return character, ids
    raise AssertionError("no vocabulary has a token for each character")


def _rust_readings(
    rust: Any, decoder: CompiledDecoder, added_tokens: Mapping[int, Any]
) -> Callable[[str, list[int]], Iterator[list[Stretch]]]:
    normalizer, pre_tokenizer = rust.normalizer, rust.pre_tokenizer
    writes_byte_level = normalizer is not None and normalizer.normalize_str("ß") == "ÃŁ"
    is_decoded = writes_byte_level or (decoder.keeps_spaces and not decoder.is_byte_level)

    def normalized(text: str) -> str:
        return text if normalizer is None else normalizer.normalize_str(text)

    def in_letters(text: str) -> str:
        """``text``, which is normalised, in the letters that the decoder writes."""
        return decoder.decode([text])[0].decode("utf-8", "replace") if is_decoded else text

    def kept(text: str) -> str:
        """What the pre-tokenizer hands on of ``text``."""
        if pre_tokenizer is None:
            return text
        pieces = pre_tokenizer.pre_tokenize_str(text)
        return "".join(text[start:end] for _, (start, end) in pieces)

    def readings(text: str, ids: list[int]) -> Iterator[list[Stretch]]:
        yield [Stretch(text if normalizer is None else in_letters(normalized(text)), ids)]
        for cuts_normalized in (False, True):
            yield [
                Stretch(spelt(part, added), part_ids, is_exact=added is not None)
                for part, part_ids, added in _cut(rust, added_tokens, text, cuts_normalized)
            ]

    def spelt(part: str, added: Any | None) -> str:
        if added is None:
            return in_letters(kept(normalized(part)))
        if rust.model.token_to_id(added.content) is not None:
            return in_letters(added.content)
        return in_letters(normalized(added.content)) if added.normalized else added.content

    return readings


def _cut(
    rust: Any, added_tokens: Mapping[int, Any], text: str, cuts_normalized: bool
) -> Iterator[tuple[str, list[int], Any | None]]:
    """Cut a text where the tokenizer does: each part is normalised and split by itself.

    ``cuts_normalized`` is whether a cut is also made at the added tokens that are looked for in
    the normalised text. White space that a token takes along is not spelt by it.
    """
    encoding = rust.encode(text, add_special_tokens=False)
    start, part_ids = 0, []
    for token_id, (left, right) in zip(encoding.ids, encoding.offsets, strict=True):
        added = added_tokens.get(token_id)
        if added is None or (
            not cuts_normalized
            if added.normalized
            else text[left:right].strip() != added.content.strip()
        ):
            part_ids.append(token_id)
            continue
        yield text[start:left], part_ids, None
        yield text[left:right], [token_id], added
        start, part_ids = right, []
    yield text[start:], part_ids, None


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
        kind = type(part).__name__
        raise UnknownDecoderError(f"its {kind} cannot be serialised: {error}") from error


def _added_bytes(added: Any, normalizer: Any, decoder: CompiledDecoder) -> bytes:
    if not added.normalized or normalizer is None:
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
    return ByteVocab(
        name,
        byte_strings,
        [*pieces],
        special_ids,
        frozenset(),
        frozenset({model.unk_id()}),
        encode=lambda text: model.encode(text),
        readings=lambda text, ids: iter([[Stretch(model.decode(ids), ids)]]),
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


def _read_slow(
    tokenizer: Any,
    name: str,
    to_bytes: Callable[[str], bytes],
    decode: Callable[[list[str]], str] | None = None,
) -> ByteVocab:
    """A tokenizer class written in Python: its tokens, spelt by ``to_bytes``.

    ``decode`` is what it makes a text of tokens with, unless ``convert_tokens_to_string`` is.
    """
    to_text = decode or tokenizer.convert_tokens_to_string
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

    def readings(text: str, ids: list[int]) -> Iterator[list[Stretch]]:
        yield [Stretch(text, ids)]
        stretches = []
        for is_added, group in itertools.groupby(ids, lambda token_id: token_id in added):
            tokens = tokenizer.convert_ids_to_tokens(run := list(group))
            part = "".join(tokens) if is_added else to_text(tokens)
            stretches.append(Stretch(part, run, is_exact=is_added))
        yield stretches

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


def _spelling(byte_string: bytes) -> str:
    return byte_string.decode("utf-8", "backslashreplace")
