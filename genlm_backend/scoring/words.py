"""Words: which tokens of a text form each word, and which tokens of a vocabulary begin words."""

from __future__ import annotations

import itertools
import operator
import re
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast, final

import numpy as np

from genlm_backend.checks import Option, shown
from genlm_backend.errors import ContextError, ContextTypeError, OptionError, OptionTypeError
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.query import TokenIds
from genlm_backend.readouts.draw import PackedMask
from genlm_backend.runtime.blocking import warn_caller
from genlm_backend.tokenization.bos import adds_bos, begins_turns

Span: TypeAlias = tuple[int, int]
"""Begin and end of a part of a text, as character indices."""

Words: TypeAlias = str | re.Pattern[str] | Callable[[str], Iterable[Span]]
"""A regular expression of words, or a function from a text to the spans of its words."""

NOT_BLANK: Final = re.compile(r"\S+")
"""Matches words that white space separates."""

BLANKS: Final = tuple(char.encode() for char in map(chr, range(0x3001)) if char.isspace())
"""The UTF-8 bytes of each white-space character."""


@final
class Region(NamedTuple):
    """A part of a text with its own surprisal: characters ``start:stop``, tokens ``first:last``."""

    start: int
    stop: int
    first: int
    last: int


@final
class Spelling:
    """The tokens of a text, as the model's tokenizer encodes it."""

    def __init__(self, lm: AsyncLM, text: str, name: str = "texts") -> None:
        self.text = text
        encode = getattr(lm.tokenizer, "encode", None)
        if encode is None:
            raise ContextError(f"{name} cannot be encoded: the model's tokenizer has no encode()")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ContextError(f"{name} cannot be encoded as UTF-8: {error}") from error
        encoded = encode(text)
        ids = [*(encoded if isinstance(encoded, list) else encoded.ids)]
        spelt = [lm.byte_vocab[i].byte_string for i in ids]
        begin, end = _spelling_part(data, spelt, [i in lm.special_ids for i in ids])
        self.token_ids: list[int] = ids[begin:end]
        spelt = spelt[begin:end]
        if not self.token_ids:
            raise ContextError(f"{name} must have at least one token, got {shown(text)}")
        if not _spells(spelt, data):
            raise ContextError(
                f"{name}: the tokens of {shown(text)} spell {shown(b''.join(spelt))} instead; the "
                f"tokenizer normalises texts, or drops part of them"
            )
        # Some tokenizers put a blank before every text; it is not a character of the text.
        num_before = sum(map(len, spelt)) - len(data)
        stops = np.cumsum([0, *(len(own) for own in spelt)]) - num_before
        self._places: list[int] = stops.tolist()
        sizes = [len(char.encode()) for char in text]
        self._chars: list[int] = np.cumsum([0, *sizes])[:-1].tolist()
        self.ends_blank = [*map(ends_blank, spelt)]

    @property
    def tokens(self) -> list[Region]:
        """Each token's region; a character split across tokens is in the region of each of them."""
        found = list[Region]()
        for i, (begin, end) in enumerate(itertools.pairwise(self._places)):
            first = bisect_right(self._chars, max(begin, 0)) - 1
            behind = bisect_left(self._chars, max(end, 0))
            found.append(Region(min(first, behind), behind, i, i + 1))
        return found

    @property
    def portions(self) -> list[list[tuple[int, int]]]:
        """For each token, pairs (character index, number of token bytes to the character's end)."""
        found = list[list[tuple[int, int]]]()
        for begin, end in itertools.pairwise(self._places):
            # A blank that the tokenizer puts before a text belongs to the first character; a token
            # without bytes belongs to the character after it, or else to the last one.
            first = bisect_right(self._chars, max(begin, 0)) - 1
            stops = [*self._chars[first + 1 : bisect_left(self._chars, end)], end]
            found.append([(char, stop - begin) for char, stop in enumerate(stops, first)])
        return found

    @property
    def characters(self) -> list[Region]:
        """Each character's region, with the tokens that have a part of it."""
        tokens = [list[int]() for _ in self.text]
        for token, portions in enumerate(self.portions):
            for char, _ in portions:
                tokens[char].append(token)
        return [Region(i, i + 1, own[0], own[-1] + 1) for i, own in enumerate(tokens)]

    def words(self, words: Words = NOT_BLANK) -> list[Region]:
        """Return the region of each word; a token between two words belongs to the second word."""
        # Words that share a token are merged. Tokens after the last word belong to no word; a text
        # without a word counts as one word.
        spans = spans_of(words, self.text) or [(0, len(self.text))]
        starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
        found, last_word = list[Region](), -1
        for i, token in enumerate(self.tokens):
            if token.start >= stops[-1]:
                break
            # The first and last word that the token overlaps, or the next word if it overlaps none.
            first = bisect_right(stops, token.start)
            last = max(first, bisect_left(starts, token.stop) - 1, last_word)
            if first <= last_word:
                found[-1] = found[-1]._replace(stop=stops[last], last=i + 1)
            else:
                found.append(Region(starts[first], stops[last], i, i + 1))
            last_word = last
        return found


def _spelling_part(
    data: bytes, spelt: Sequence[bytes], are_special: Sequence[bool]
) -> tuple[int, int]:
    """Return begin and end of the tokens that spell a text, without special tokens around them."""
    size = len(spelt)
    most = next((i for i, is_special in enumerate(are_special) if not is_special), size)
    least = next((size - i for i, own in enumerate(reversed(are_special)) if not own), 0)
    parts = itertools.product(range(most + 1), range(size, least - 1, -1))
    around = sorted(parts, key=lambda part: part[0] - part[1])  # strip as few tokens as possible
    return next((part for part in around if _spells(spelt[slice(*part)], data)), (most, least))


def _spells(spelt: Sequence[bytes], data: bytes) -> bool:
    joined = b"".join(spelt)
    return joined in (data, b" " + data)


def check_words(name: str, words: Words) -> re.Pattern[str] | Callable[[str], Iterable[Span]]:
    """Check that ``words`` is a regular expression or function; return it, compiled if a string."""
    if isinstance(words, str):
        try:
            return re.compile(words)
        except re.error as error:
            raise OptionError(f"{name} must be a regular expression: {error}") from error
    is_pattern = isinstance(words, re.Pattern) and isinstance(words.pattern, str)
    if not is_pattern and not callable(words):
        raise OptionTypeError(
            f"{name} must be a regular expression or a function of a text, got {shown(words)}"
        )
    return words


WORDS: Final = Option(NOT_BLANK, check_words)
"""The option ``words``, the definition of a word."""


def spans_of(words: Words, text: str) -> list[Span]:
    """Return the spans of a text's words; raise an error unless they are ordered and disjoint."""
    words = check_words("words", words)
    if isinstance(words, re.Pattern):
        return [match.span() for match in words.finditer(text) if match.group()]
    try:
        spans = [*words(text)]
    except Exception as error:
        raise OptionError(f"words must return spans for {shown(text)}: {error}") from error
    found, end = list[Span](), 0
    for pair in spans:
        try:
            start, stop = map(operator.index, pair)
        except (TypeError, ValueError) as error:
            raise OptionTypeError(
                f"words must return pairs of integers, got {shown(pair)}"
            ) from error
        if not end <= start < stop <= len(text):
            raise OptionError(
                f"words must return non-empty spans in order, within the text's {len(text)} "
                f"characters: the next must begin at {end} or later, got {(start, stop)}"
            )
        found.append((start, stop))
        end = stop
    return found


def ends_blank(data: bytes) -> bool:
    return data.endswith(BLANKS)


_masks: Final[weakref.WeakKeyDictionary[Any, PackedMask]] = weakref.WeakKeyDictionary()
"""The mask of ``word_begins`` by alphabet; if a model's EOS ids change, so does its alphabet."""


def word_begins(lm: AsyncLM) -> PackedMask:
    """Return a mask of the tokens that end the word before them: blank-initial, special, EOS."""
    alphabet = lm.alphabet
    mask = _masks.get(alphabet)
    if mask is None:
        # Tokens that begin with only a part of a multi-byte blank do not count.
        begins: list[Any] = [token.byte_string.startswith(BLANKS) for token in lm.byte_vocab]
        bools = np.array(begins, np.bool_)
        bools[[*lm.special_ids, *lm.eos_token_ids]] = True
        bools[[*lm.undefined_ids]] = False
        mask = _masks[alphabet] = PackedMask(np.packbits(bools).tobytes(), len(bools))
    return mask


def context_ids(lm: AsyncLM, context: str | TokenIds | None, name: str = "context") -> list[int]:
    """Return the token ids of a context, at least one: the BOS if it is ``None`` or empty text."""
    has_bos = getattr(lm.tokenizer, "bos_token_id", None) is not None
    if context is None or (has_bos and context == ""):
        if not has_bos:
            raise OptionError(
                "the tokenizer has no BOS token (bos_token_id) to begin texts with: pass context=, "
                "such as [lm.tokenizer.eos_token_id] if EOS separated texts in training"
            )
        return [default_beginning(lm)]
    if isinstance(context, str):
        ids = Spelling(lm, context, name).token_ids
        # A rendered chat begins with a special token of its template, and gets no BOS unless the
        # tokenizer adds one to texts.
        is_special = ids[0] in lm.special_ids and not adds_bos(lm.tokenizer)
        begins = not has_bos or is_special or ids[0] == lm.tokenizer.bos_token_id
        return ids if begins else [default_beginning(lm), *ids]
    try:
        return [*lm.contexts.check_context(cast(TokenIds, context), name=name)]
    except ContextTypeError as error:
        many = "" if name != "context" else "; for one context per text, pass contexts="
        raise ContextTypeError(f"{name} must be a text or token ids: {error}{many}") from error


_begun: Final[weakref.WeakSet[AsyncLM]] = weakref.WeakSet()
"""Models for which ``default_beginning`` was called before; it does not warn about them again."""


def default_beginning(lm: AsyncLM, option: str = "context") -> int:
    """Return the tokenizer's BOS; warn once per model if the chat template repeats it per turn."""
    if lm not in _begun:
        _begun.add(lm)
        if begins_turns(lm.tokenizer):
            warn_caller(
                f"texts are scored after {lm.tokenizer.bos_token!r}, the tokenizer's bos_token, "
                "which the chat template writes before each message: plain texts perhaps never "
                f"followed it in training. As {option}=, pass the token that separated texts"
            )
    return int(lm.tokenizer.bos_token_id)


def is_between_words(lm: AsyncLM, context: Sequence[int]) -> bool:
    """Return whether a context ends outside a word: with a blank, a special token or an EOS."""
    last = context[-1]
    is_end = last in lm.special_ids or last in lm.eos_token_ids
    return is_end or ends_blank(lm.byte_vocab[last].byte_string)
