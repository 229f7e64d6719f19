"""prefix_logprob: how probable a text is that begins with some bytes, by all tokenisations."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.checks import checked, instance, integer, number, shown, switch
from genlm_backend.errors import ContextError, OptionError, OptionTypeError
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.context import Context
from genlm_backend.model.query import TokenIds
from genlm_backend.model.token_readouts import ReadoutOf, chosen_of, masses_of
from genlm_backend.scoring.search import Question, Search, searched, searched_sync
from genlm_backend.scoring.words import (
    BLANKS,
    NOT_BLANK,
    Words,
    check_words,
    context_ids,
    ends_blank,
    is_between_words,
    spans_of,
    word_begins,
)


@final
class PrefixLogprob(NamedTuple):
    """The log-probability that a text begins with some bytes, within bounds; in nats.

    Attributes:
        logprob: The logarithm of what has been found, a lower bound; ``-inf`` for nothing.
        log_rest: The logarithm of what may be missing from it at most; ``-inf`` where all
            tokenisations have been summed.
    """

    logprob: float
    log_rest: float

    @property
    def upper(self) -> float:
        """The upper bound of the log-probability."""
        return min(0.0, float(np.logaddexp(self.logprob, self.log_rest)))

    def __repr__(self) -> str:
        bounds = f"logprob={self.logprob:.6g}, log_rest={self.log_rest:.6g}"
        return f"PrefixLogprob({bounds}, upper={self.upper:.6g})"


async def prefix_logprob(
    lm: AsyncLM,
    context: str | TokenIds | None,
    text: str | bytes,
    *,
    word_ends: bool = False,
    words: Words = NOT_BLANK,
    max_rest: float = 0.01,
    max_contexts: int = 200,
    lora_name: str | None = None,
) -> PrefixLogprob:
    """Return the log-probability that what comes behind a context begins with a text.

    It is summed over all tokenisations: over all sequences of tokens that spell the text, or
    spell a beginning of it and go on with a token that begins with the rest of it. Whatever comes
    then is not asked about, so that ``" cat"`` has the probability of ``" category"`` within it. A
    text that ends has no further bytes: special tokens, those that end texts and those without
    bytes begin nothing.

    Sequences are followed from the most probable on, those first that lead far for what they cost;
    each wave of contexts shares batches with whatever else the model is asked. The answer is
    exact up to rounding but for its ``log_rest``. There are many sequences of nearly no
    probability, which all together may still be as probable as a long text, so that the upper
    bound of a text of many words is loose where the lower one is not.

    Args:
        lm: The model.
        context: A text or token ids, which come before; ``None`` for the token that texts begin
            with (``bos_token_id`` of the tokenizer). A text is read behind that token as well,
            unless it spells a special token first; token ids are taken as they are.
        text: The bytes; a string is taken as UTF-8. A word that follows another begins with its
            blank.
        word_ends: Whether the last word of the text has to end: whether a blank or the end of the
            text comes behind it, as ``continuations`` counts words. Where a text that begins with a
            blank comes behind a context that ends within a word, the answer is given that this word
            ends, as there. So ``" cat"`` has the probability of the word ``"cat"`` behind one
            blank, and that of ``" category"`` is not within it.
        words: What a word is where ``word_ends=True``, as of ``continuations``: a regular
            expression or a function from a text to the spans of its words, by default what blanks
            separate. With words of your own, the last word has ended as soon as a character
            follows that is none of it, and the context may end within a word.
        max_rest: The part of the answer that may be missing, from 0 on; at it the search ends.
        max_contexts: Number of contexts to ask about at most; at it the search ends, too. A text
            takes one for each of its tokens at least, or nothing is found.
        lora_name: The adapter to read with.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or the tokenizer names no token
            that texts begin with and ``context`` is ``None``.
        ContextError: (``ValueError``) If ``context`` or ``text`` cannot be read, or ``text`` does
            not end with a word where its last word has to end.
        Exception: What ``next_token_logprobs`` raises.
    """
    search = _search(lm, context, text, word_ends, words, max_rest, max_contexts)
    return await searched(lm, search, lora_name)


def prefix_logprob_sync(
    lm: AsyncLM,
    context: str | TokenIds | None,
    text: str | bytes,
    *,
    word_ends: bool = False,
    words: Words = NOT_BLANK,
    max_rest: float = 0.01,
    max_contexts: int = 200,
    lora_name: str | None = None,
) -> PrefixLogprob:
    """Return the same log-probability as ``prefix_logprob``, blocking the calling thread."""
    search = _search(lm, context, text, word_ends, words, max_rest, max_contexts)
    return searched_sync(lm, search, lora_name)


_CHECKS: Final = {"word_ends": switch, "max_rest": number(0, 1), "max_contexts": integer(1)}


class _Path(NamedTuple):
    """Tokens that spell a beginning of what is looked for."""

    logprob: float
    spelt: bytes
    context: Context


def _search(
    lm: Any, context: Any, text: Any, word_ends: Any, words: Any, max_rest: Any, max_contexts: Any
) -> Search[PrefixLogprob]:
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    bounds = {"word_ends": word_ends, "max_rest": max_rest, "max_contexts": max_contexts}
    given = checked(_CHECKS, bounds)
    words = check_words(words)
    if words != NOT_BLANK and not given["word_ends"]:
        raise OptionError("words is for word_ends=True")
    data = _bytes_of(text, given["word_ends"] and words == NOT_BLANK)
    begin = lm.contexts.check(context_ids(lm, context), lm.max_length, name="context")
    log_share = math.log(given["max_rest"]) if given["max_rest"] else -math.inf
    if not data and not given["word_ends"]:
        return PrefixLogprob(0.0, -math.inf)
    is_between = context is None or is_between_words(lm, begin)
    ends = None if words == NOT_BLANK else _WordEnds(words, data)
    ways = _Ways(lm, data, given["word_ends"], not is_between, ends)
    best = np.full(ways.longest + 1, -np.inf)  # the most probable path of those that end at a byte
    found, paths = -math.inf, [_Path(0.0, b"", begin)]
    too_long, left = list[float](), given["max_contexts"]
    while True:
        rest = _log_sum([*too_long, *(path.logprob for path in paths)])
        is_enough = rest <= log_share + np.logaddexp(found, rest)
        if not paths or not left or is_enough:
            return PrefixLogprob(min(found, 0.0), min(rest, 0.0))
        wave, paths = _most_promising(paths, best, log_share, min(left, lm.batch_size))
        left -= len(wave)
        answers = iter((yield [question for path in wave for question in ways.questions(path)]))
        for path in wave:
            mass, children = ways.followed(path, answers)
            found = float(np.logaddexp(found, mass))
            for child in children:
                if lm.max_length is not None and len(child.context) > lm.max_length:
                    too_long.append(child.logprob)
                elif child.logprob > -math.inf:
                    paths.append(child)
                    size = len(child.spelt)
                    best[size] = max(best[size], child.logprob)
        best[-1] = found


def _bytes_of(text: Any, word_ends: bool) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise OptionTypeError(f"text must be a string or bytes, got {shown(text)}")
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError as error:
        raise ContextError(f"text must be of characters: {error}") from error
    if word_ends and ends_blank(data):
        raise ContextError(
            f"text must end with its last word where word_ends=True, and not with a blank: "
            f"got {shown(text)}"
        )
    return data


def _log_sum(logprobs: Sequence[float]) -> float:
    return float(np.logaddexp.reduce(logprobs)) if logprobs else -math.inf


def _most_promising(
    paths: list[_Path], best: NDArray[np.float64], log_share: float, size: int
) -> tuple[list[_Path], list[_Path]]:
    """Return the paths to follow next, and the others.

    A path is compared with the most probable of those that have come as far or farther: by its
    probability alone, short ones would all come first, and the end of a long text last. When no
    path that compares well is left, the most probable go first, of which the rest is made.
    """
    ahead = np.maximum.accumulate(best[::-1])[::-1].tolist()

    def promise(path: _Path) -> tuple[bool, float]:
        compared = path.logprob - max(ahead[len(path.spelt)], path.logprob)
        is_good = compared >= log_share
        return is_good, compared if is_good else path.logprob

    paths.sort(key=promise, reverse=True)
    num_good = sum(promise(path)[0] for path in paths[:size])
    size = num_good or size
    return paths[:size], paths[size:]


class _Steps(NamedTuple):
    """The tokens that may come behind some bytes, and the readouts of them."""

    tokens: list[tuple[int, bytes]]
    readouts: list[ReadoutOf]


@final
class _WordEnds:
    """The end of a text's last word, by words of the caller's own."""

    def __init__(self, words: Words, data: bytes) -> None:
        try:
            self._text = data.decode()
        except UnicodeDecodeError as error:
            raise ContextError(f"text must be UTF-8 where words are given: {error}") from error
        self._words, self._spans = words, spans_of(words, self._text)
        if not self._spans or self._spans[-1][1] < len(self._text):
            raise ContextError(
                f"text must end with its last word where word_ends=True, got {shown(self._text)}, "
                f"whose words are at {self._spans}"
            )

    def has_come(self, spelt: bytes, is_all: bool = False) -> bool | None:
        """Return whether the word has ended in some bytes that begin with the text."""
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(spelt, is_all)
        if text == self._text and not is_all:
            return None
        return spans_of(self._words, text)[: len(self._spans)] == self._spans


@final
class _Ways:
    """The ways of tokens to a text, or to a text whose last word ends."""

    def __init__(
        self,
        lm: AsyncLM,
        data: bytes,
        word_ends: bool,
        is_within: bool,
        ends: _WordEnds | None,
    ) -> None:
        self._alphabet, self._size, self._data = lm.alphabet, len(lm.byte_vocab), data
        self._byte_vocab, self._ends = lm.byte_vocab, ends
        self._wanted = [data + blank for blank in BLANKS] if word_ends else [data]
        self.longest = max(map(len, self._wanted))  # a part of a character is no longer than blanks
        self._word_ends = word_ends
        self._given: NDArray[np.bool_] | None = None
        if ends is None and word_ends and is_within and data.startswith(BLANKS):
            self._given = word_begins(lm).unpacked().numpy() | lm.alphabet.ends
        self._steps: Final = cache(self._steps_behind)

    def _steps_behind(self, spelt: bytes) -> _Steps:
        """Return the tokens that may come behind some bytes.

        The groups are of all tokens behind which nothing is left to be spelt, if there are any; and
        in the first step, where that is given, of all that end the word before the text.
        """
        alphabet, longest = self._alphabet, self._alphabet.longest
        if self._ends is not None:
            return self._steps_to_end(self._ends, spelt)
        rests = [own[len(spelt) :] for own in self._wanted if own.startswith(spelt)]
        parts = {rest[:i] for rest in rests for i in range(1, min(longest + 1, len(rest)))}
        tokens = [(i, spelt + part) for part in sorted(parts) for i in alphabet.spelling(part)]
        beyond = [alphabet.beginning_with(rest) for rest in rests if len(rest) <= longest]
        if self._word_ends and spelt == self._data:
            beyond.append(alphabet.ends)
        groups = [np.logical_or.reduce(beyond)] if beyond else []
        if self._given is not None and not spelt:
            groups.append(self._given)
            tokens = [(i, own) for i, own in tokens if self._given[i]]
        readouts: list[ReadoutOf] = [masses_of(groups, self._size)]
        if tokens:
            readouts.append(chosen_of([token_id for token_id, _ in tokens], self._size))
        return _Steps(tokens, readouts)

    def _steps_to_end(self, ends: _WordEnds, spelt: bytes) -> _Steps:
        """Return the tokens that may come behind some bytes, by words of the caller's own."""
        alphabet, rest = self._alphabet, self._data[len(spelt) :]
        parts = (rest[:i] for i in range(1, min(alphabet.longest + 1, len(rest))))
        tokens = [(i, spelt + part) for part in parts for i in alphabet.spelling(part)]
        ending = np.zeros(self._size, np.bool_)
        if not rest and ends.has_come(spelt, is_all=True):
            ending |= alphabet.ends
        for i in np.flatnonzero(alphabet.beginning_with(rest)).tolist():
            own = spelt + self._byte_vocab[i].byte_string
            has_come = ends.has_come(own)
            ending[i] = has_come is True
            if has_come is None:
                tokens.append((i, own))
        readouts: list[ReadoutOf] = [masses_of([ending], self._size)]
        if tokens:
            readouts.append(chosen_of([token_id for token_id, _ in tokens], self._size))
        return _Steps(tokens, readouts)

    def questions(self, path: _Path) -> list[Question]:
        """Return the questions that are asked behind a path."""
        return [(path.context, readout) for readout in self._steps(path.spelt).readouts]

    def followed(self, path: _Path, answers: Iterator[Any]) -> tuple[float, list[_Path]]:
        """Return the log-probability of all ends of a path, and the paths that go on from it."""
        tokens, readouts = self._steps(path.spelt)
        masses, before = next(answers).tolist(), path.logprob
        if self._given is not None and not path.spelt:
            given = masses.pop()
            before -= given if given > -math.inf else 0.0
        mass = masses[0] if masses else -math.inf
        logprobs = next(answers).tolist() if len(readouts) > 1 else []
        return before + mass, [
            _Path(before + logprob, spelt, path.context.extend(token_id))
            for (token_id, spelt), logprob in zip(tokens, logprobs, strict=True)
        ]
