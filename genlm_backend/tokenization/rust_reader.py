"""Reads the bytes of every token id of a ``tokenizers.Tokenizer``, or of a wrapper around one."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.decoder import (
    CompiledDecoder,
    UnknownDecoderError,
    compile_decoder,
    infer_decoder,
    is_byte_token,
)
from genlm_backend.tokenization.token import ByteVocab

# Roughly the texts to check per kind of added token: Gemma has 6,400 such tokens of two kinds.
_TEXTS_OF_A_KIND: Final = 64


def read_rust(tokenizer: Any, rust: Any, name: str) -> ByteVocab:
    """Read the bytes of every id from ``rust``, which ``tokenizer`` is or wraps."""
    spellings = _spellings(rust)
    encode = partial(_encode, rust)
    unheard_of, unheard_of_ids = _unheard_of(encode, spellings)
    falls_back = any(is_byte_token(spellings[token_id] or "") for token_id in unheard_of_ids)
    try:
        decoder = _decoder(rust, falls_back)
    except UnknownDecoderError as error:
        token = spellings[0] if spellings else None
        raise TokenizerDecodeError(name, str(error), 0 if spellings else None, token) from error
    byte_strings = decoder.decode([spelling or "" for spelling in spellings])
    undefined_ids = frozenset(i for i, spelling in enumerate(spellings) if spelling is None)
    for token_id in undefined_ids:
        byte_strings[token_id] = b""
    added_tokens = rust.get_added_tokens_decoder()
    special_ids = _special_ids(tokenizer, added_tokens)
    if falls_back:  # byte tokens spell texts even if they are marked as special
        special_ids -= {i for i in special_ids if is_byte_token(spellings[i] or "")}
    for token_id in special_ids:
        added = added_tokens.get(token_id)
        name_of_token = spellings[token_id] if added is None else added.content
        byte_strings[token_id] = (name_of_token or "").encode()
    texts = _Texts(rust, decoder)
    ordinary = {i: added_tokens[i] for i in sorted(added_tokens.keys() - special_ids)}
    for token_id, added in ordinary.items():
        if rust.model.token_to_id(added.content) is None:
            byte_strings[token_id] = texts.added_bytes(added.content, added.normalized)
        elif spellings[token_id] != added.content:  # the vocabulary has the normalised spelling
            spelt = decoder.decode([added.content])[0]
            if texts.can_come_back(spelt):  # otherwise only the added token produces the id
                byte_strings[token_id] = spelt
    of_model = {
        i: (added.content.encode(), texts.spelt_by_model(added))
        for i, added in ordinary.items()
        if rust.model.token_to_id(added.content) is not None
    }
    unknown = getattr(rust.model, "unk_token", None) or getattr(tokenizer, "unk_token", None)
    unknown_ids = {rust.token_to_id(unknown)} if unknown else set()
    if not unknown or not hasattr(rust.model, "unk_token"):
        # A Unigram model does not expose its unknown id, which may differ from the tokenizer's. It
        # is among the unheard-of character's ids, where a space's replacement may precede it.
        heard = [i for i in unheard_of_ids if spellings[i] != texts.written_space]
        heard = [i for i in heard if byte_strings[i].strip()]
        unknown_ids.update(i for i in heard if byte_strings[i] not in unheard_of.encode())
    return ByteVocab(
        name=name,
        byte_strings=byte_strings,
        spellings=spellings,
        special_ids=frozenset(special_ids),
        undefined_ids=undefined_ids,
        unknown_ids=frozenset(i for i in unknown_ids if i is not None),
        keeps_spaces=False,
        encode=encode,
        readings=partial(texts.readings, of_model),
        prints=_printing(rust, byte_strings, spellings),
        added_texts=_added_texts(rust, ordinary, byte_strings),
        bytes_of_added={i: data for i, (_, data) in of_model.items()},
    )


def _added_texts(
    rust: Any, added_tokens: Mapping[int, Any], byte_strings: Sequence[bytes]
) -> list[str]:
    """Return texts that are encoded as added tokens, about ``_TEXTS_OF_A_KIND`` per kind."""
    texts: defaultdict[tuple[bool, ...], list[str]] = defaultdict(list)
    for token_id, added in added_tokens.items():
        # Texts other than the content may produce the id: two spaces produce Gemma's "▁▁".
        is_rewritten = byte_strings[token_id] != added.content.encode()
        flags = (added.normalized, added.lstrip, added.rstrip, added.single_word)
        of_its_kind = texts[(is_rewritten, *flags)]
        if len(of_its_kind) < _TEXTS_OF_A_KIND:
            of_its_kind.append(added.content)
            if added.single_word:
                of_its_kind.append(f" {added.content} ")
            if added.normalized:  # a normaliser may put a space before it
                of_its_kind.append(f" {added.content}")
            if is_rewritten:
                of_its_kind.append(rust.decode([token_id], skip_special_tokens=False))
    return [*itertools.chain.from_iterable(texts.values())]


def _encode(rust: Any, text: str) -> list[int] | None:
    """Return the ids of a text, undoing truncation and padding; ``None`` if encoding fails."""
    try:
        first = rust.encode(text, add_special_tokens=False)
    except BaseException as error:  # for a character without a token; some texts make Rust panic
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            return None
        raise
    truncation = rust.truncation
    # transformers leaves truncation and padding set after a call that uses them. The tokens cut off
    # are in ``overflowing`` windows, which begin (or, with left truncation, end) with ``stride``
    # tokens of their neighbour.
    if truncation is None and rust.padding is None:
        return first.ids
    windows = [first, *first.overflowing]
    in_common = 0 if truncation is None else truncation["stride"]
    if truncation is not None and truncation["direction"] == "left":
        windows.reverse()
    ids: list[int] = []
    for window in windows:
        found = [*itertools.compress(window.ids, window.attention_mask)]
        ids.extend(found[in_common if ids else 0 :])
    return ids


def _spellings(rust: Any) -> list[str | None]:
    size = rust.get_vocab_size(with_added_tokens=True)
    spellings: list[str | None] = [rust.id_to_token(i) for i in range(size)]
    if None in spellings:  # the ids have holes, so some ids are not less than ``size``
        largest = max(rust.get_vocab(with_added_tokens=True).values(), default=-1)
        spellings.extend(rust.id_to_token(i) for i in range(size, largest + 1))
    return spellings


def _unheard_of(
    encode: Callable[[str], list[int] | None], spellings: Sequence[str | None]
) -> tuple[str, list[int]]:
    """Return a character whose tokens do not contain it, and the ids of these tokens."""
    # Try rare ideographs that have long been in Unicode: no normaliser changes or drops them.
    for character in map(chr, range(0x2A6D6, 0x20000, -1)):
        ids = encode(character) or []
        if not any(character in (spellings[token_id] or "") for token_id in ids):
            return character, ids
    return "", []


def _special_ids(tokenizer: Any, added_tokens: Mapping[int, Any]) -> set[int]:
    named = set(getattr(tokenizer, "special_tokens_map", {}).values())
    special_ids: set[int] = set(getattr(tokenizer, "all_special_ids", ()))
    for token_id, added in added_tokens.items():
        if added.special:
            special_ids.add(token_id)
        # transformers lists a converted SentencePiece model's user-defined pieces as special; they
        # are not, unless ``special_tokens_map`` names one, say as ``eos_token``.
        elif added.content not in named:
            special_ids.discard(token_id)
    return special_ids


def _decoder(rust: Any, falls_back: bool) -> CompiledDecoder:
    """Return the declared or inferred decoder, plus a word-end suffix or byte fallback, if any."""
    settings = ("end_of_word_suffix", "continuing_subword_prefix", "byte_fallback")
    model = {setting: getattr(rust.model, setting, None) for setting in settings}
    if rust.decoder is not None:
        decoder = compile_decoder(_state(rust.decoder))
    else:
        decoder = infer_decoder(
            _state(rust.pre_tokenizer) if rust.pre_tokenizer is not None else None,
            _state(rust.normalizer) if rust.normalizer is not None else None,
            {"type": type(rust.model).__name__, **model},
        )
    if decoder.is_byte_level and model["end_of_word_suffix"]:
        return decoder.with_word_ends(model["end_of_word_suffix"])  # such as CLIP's tokenizer
    return decoder.with_byte_fallback() if falls_back else decoder


def _printing(
    rust: Any, byte_strings: Sequence[bytes], spellings: Sequence[str | None]
) -> Callable[[list[int]], tuple[list[int], str]] | None:
    """Return a function from ids to those that can be checked, and the decoder's text for them.

    ``None`` if the tokenizer declares no decoder.
    """
    if rust.decoder is None:
        return None
    declared = compile_decoder(_state(rust.decoder))
    first, last = rust.decoder.decode(["a"]), declared.decode(["a"])[0].decode()

    def prints(ids: list[int]) -> tuple[list[int], str]:
        alone = declared.decode([spellings[token_id] or "" for token_id in ids])
        pairs = zip(ids, alone, strict=True)
        kept = [token_id for token_id, spelt in pairs if byte_strings[token_id] == spelt]
        between = (spellings[token_id] or "" for token_id in kept)
        printed = rust.decoder.decode(["a", *between, "a"])  # in the middle of a text
        return kept, printed.removeprefix(first).removesuffix(last)

    return prints


def _state(part: Any) -> dict[str, Any]:
    try:
        return json.loads(part.__getstate__())
    except Exception as error:  # a component written in Python cannot be serialised
        kind = type(part).__name__
        raise UnknownDecoderError(
            f"the tokenizer's {kind} cannot be serialised: {error}"
        ) from error


@final
class _Texts:
    """Normalises texts, and computes the byte strings that a text's tokens may spell."""

    def __init__(self, rust: Any, decoder: CompiledDecoder) -> None:
        self.decoder, self.normalizer = decoder, rust.normalizer
        # Probe the normaliser, since one written in Python has no state to inspect.
        self.writes_spaces = " " not in self.normalized("x x")
        self.writes_byte_level = self.normalized("ß") == "ÃŁ"
        pieces = [("x x", (0, 3))]
        if rust.pre_tokenizer is not None:
            pieces = rust.pre_tokenizer.pre_tokenize_str("x x")
        _, *between, _ = *"".join(piece for piece, _ in pieces).split("x"), ""
        # The pre-tokenizer's replacement of a space; "" if it drops spaces.
        self.written_space = between[0] if len(between) == 2 else ""

    def normalized(self, text: str) -> str:
        return text if self.normalizer is None else self.normalizer.normalize_str(text)

    def added_bytes(self, text: str, is_normalized: bool) -> bytes:
        """Return the bytes of an added token that is neither special nor in the model."""
        text = self.normalized(text) if is_normalized else text
        if self.decoder.reads_bytes and not (is_normalized and self.writes_spaces):
            # A byte-level decoder would read each character as a byte; a text spells them in UTF-8.
            return text.encode()
        return self.decoder.decode([text])[0]

    def readings(
        self, added: Mapping[int, tuple[bytes, bytes]], text: str, ids: list[int]
    ) -> list[bytes]:
        """Return the byte strings that the tokens of ``text`` may spell, up to white space."""
        written = self.written_space
        texts = [text, text.replace(written, " ")] if written else [text]
        normalized = [self.normalized(each) for each in texts]
        spelt = [*(each.encode() for each in texts), *map(self._spelt, normalized)]
        for content, data in (added[i] for i in added.keys() & {*ids}):
            spelt = [each.replace(content, data) for each in spelt]
        return spelt

    def _spelt(self, normalized: str) -> bytes:
        """Return the bytes of a normalised text, decoded if the decoder applies to a whole text."""
        decoder = self.decoder
        if self.writes_byte_level or (decoder.keeps_spaces and not decoder.is_byte_level):
            return decoder.decode([normalized])[0]
        return normalized.encode()

    def can_come_back(self, spelt: bytes) -> bool:
        """Whether normalising and decoding a token's text preserve its bytes, up to outer spaces.

        True for bytes that are not valid UTF-8.
        """
        try:
            normalized = self._spelt(self.normalized(spelt.decode()))
        except UnicodeDecodeError:  # an incomplete character
            return True
        return normalized.strip() == spelt.strip()

    def spelt_by_model(self, added: Any) -> bytes:
        """Return the model's bytes for an added token that the model has too."""
        if added.normalized and self.writes_spaces:
            return self.decoder.decode([self.normalized(added.content)])[0]
        spelt = self.decoder.decode([added.content])[0]
        if added.normalized and not self.can_come_back(spelt):
            return self._spelt(self.normalized(added.content))
        try:
            spelt.decode()
        except UnicodeDecodeError:
            # The model may read "é" as one byte, but a text spells it as two. Return these two, so
            # that the self-check fails, unless the token is a byte token.
            return spelt if is_byte_token(added.content) else added.content.encode()
        return spelt
