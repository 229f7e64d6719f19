"""continuations and prefix_logprob: searches of the tokenisations that spell words and prefixes."""

from __future__ import annotations

import codecs
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypedDict, Unpack, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.checks import (
    Option,
    checked_options,
    instance,
    integer,
    number,
    shown,
    shows_options,
    switch,
)
from genlm_backend.errors import ContextError, OptionError, OptionTypeError
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import TokenIds
from genlm_backend.readouts.token_readouts import ReadoutOf, chosen_of, masses_of, top_of
from genlm_backend.runtime.blocking import blocking, in_form
from genlm_backend.scoring.words import (
    BLANKS,
    NOT_BLANK,
    WORDS,
    Span,
    Words,
    context_ids,
    ends_blank,
    is_between_words,
    spans_of,
    word_begins,
)

ContextReadout: TypeAlias = tuple[Context, ReadoutOf]


@final
class Continuation(NamedTuple):
    """A word that may come next, and its log-probability as far as it has been found.

    Attributes:
        text: The word, without the blanks around it; bytes of it that are no UTF-8 are ``"�"``.
        logprob: The log-probability of all tokenisations that have been found, in nats: a lower
            bound, from which nothing but the rest of all words can be missing.
    """

    text: str
    logprob: float


@final
class Continuations(list[Continuation]):
    """The most probable words that may come next, the most probable first.

    Attributes:
        context: The token ids that they come behind.
        log_end: The log-probability that no word comes, because the text ends.
        log_rest: The logarithm of the probability that has not been explored, which may belong to
            these words or to others; ``-inf`` for none.
        is_proven: Whether no word that is left out, or that comes later in the list, can be more
            probable than one before it: whether the rest is less than what they differ by. Not so
            where there are fewer words than were asked for, unless nothing is left.
    """

    def __init__(
        self,
        values: Iterable[Continuation],
        *,
        context: Sequence[int],
        log_end: float,
        log_rest: float,
        is_proven: bool,
    ) -> None:
        super().__init__(values)
        self.context, self.log_end = tuple(context), log_end
        self.log_rest, self.is_proven = log_rest, is_proven

    @property
    def explored(self) -> float:
        """The probability that has been explored: of all words found, and of the text's end."""
        return 1 - math.exp(self.log_rest)

    def __repr__(self) -> str:
        parts = (f"{own.text!r} {math.exp(own.logprob):.3g}" for own in itertools.islice(self, 6))
        more = ", …" if len(self) > 6 else ""
        return f"Continuations({', '.join(parts)}{more}; {self.explored:.1%} explored)"


class SearchOptions(TypedDict, total=False):
    """The options of ``continuations`` and ``prefix_logprob``, which say what they mean."""

    words: Annotated[Words, WORDS]
    max_rest: Annotated[float, Option(0.05, number(0, 1))]
    max_contexts: Annotated[int, Option(200, integer(1))]
    lora_name: Annotated[str | None, Option()]


@shows_options(SearchOptions)
async def continuations(
    lm: AsyncLM,
    context: str | TokenIds | None,
    n: int = 10,
    **options: Unpack[SearchOptions],
) -> Continuations:
    """Return the most probable words behind a context, as a cloze task asks for them.

    The probability of a word is that of all tokens that spell it, in whatever way, and go on with
    a blank or end the text; where the context ends within a word, given that it ends there. These
    are the probabilities of ``surprisal``, summed over all tokenisations, so that those of all
    words and of the end of the text come to one. Tokens are followed from the most probable on;
    each wave of contexts shares batches with whatever else the model is asked.

    Exact up to rounding are ``log_rest``, the share that has not been explored, and so the bounds
    of each word: it is at least as probable as it says, and more by the rest at most.

    Args:
        lm: The model.
        context: A text or token ids, which come before; ``None`` for the token that texts begin
            with (``bos_token_id`` of the tokenizer). A text is read behind that token as well,
            unless it spells a special token first; token ids are taken as they are. A text that
            words follow ends without a blank, which belongs to the word's token.
        n: Number of words.
        **options: ``words``, what a word is: a regular expression or a function from a text to the
            spans of its words, by default what blanks separate. With words of your own, the first
            one in what comes behind the context is meant, whether or not the context ends within a
            word; it has ended as soon as a character follows it. ``max_rest``, the probability that
            may be left unexplored, from 0 to 1; at it the search ends. ``max_contexts``, the number
            of contexts to ask about at most; at it the search ends, too. ``lora_name``, the adapter
            to read with.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or the tokenizer names no token
            that texts begin with and ``context`` is ``None``.
        ContextError: (``ValueError``) If ``context`` cannot be read.
        Exception: What ``next_token_logprobs`` raises.
    """
    num_words, given = integer(1)("n", n), _checked(lm, options)
    begin = lm.contexts.check_context(context_ids(lm, context), lm.max_length, name="context")
    is_between, asked = context is None or is_between_words(lm, begin), await in_form(lm)
    explored = _Explored(lm, given["words"], begin, is_between)
    wave, left = [explored.begin], given["max_contexts"]
    while wave:
        num_tokens = min(max(left, _FEWEST), len(lm.byte_vocab))
        questions = [own for node in wave for own in explored.questions(node, num_tokens)]
        answers = await _answered(asked, questions, given["lora_name"])
        for node in wave:
            explored.read(node, answers)
        left -= len(wave)
        is_enough = not left or explored.rest <= given["max_rest"]
        wave = [] if is_enough else explored.follow(min(left, lm.batch_size))
    explored.follow(math.inf, _LEAST)
    return explored.best(num_words)


continuations_sync = blocking(continuations, "words")


_MAX_REST: Final = 0.01
"""The part of the log-probability of a prefix that may be missing, by default."""


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


@shows_options(SearchOptions, max_rest=_MAX_REST)
async def prefix_logprob(
    lm: AsyncLM,
    context: str | TokenIds | None,
    text: str | bytes,
    *,
    word_ends: bool = False,
    **options: Unpack[SearchOptions],
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
        context: The text or token ids that come before, or ``None``, as of ``continuations``.
        text: The bytes; a string is taken as UTF-8. A word that follows another begins with its
            blank.
        word_ends: Whether the last word of the text has to end: whether a blank or the end of the
            text comes behind it, as ``continuations`` counts words. Where a text that begins with a
            blank comes behind a context that ends within a word, the answer is given that this word
            ends, as there. So ``" cat"`` has the probability of the word ``"cat"`` behind one
            blank, and that of ``" category"`` is not within it.
        **options: ``words``, what a word is if ``word_ends=True``, as of ``continuations``. With
            words of your own, the last word has ended as soon as a character follows that is none
            of it, and the context may end within a word. ``max_rest``, the part of the answer that
            may be missing, from 0 on; at it the search ends. ``max_contexts``, the number of
            contexts to ask about at most; at it the search ends, too. A text takes one for each of
            its tokens at least, or nothing is found. ``lora_name``, the adapter to read with.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or the tokenizer names no token
            that texts begin with and ``context`` is ``None``.
        ContextError: (``ValueError``) If ``context`` or ``text`` cannot be read, or ``text`` does
            not end with a word where its last word has to end.
        Exception: What ``next_token_logprobs`` raises.
    """
    word_ends = switch("word_ends", word_ends)
    given = _checked(lm, {"max_rest": _MAX_REST, **options})
    words: Words = given["words"]
    if words != NOT_BLANK and not word_ends:
        raise OptionError("words is for word_ends=True")
    data = _bytes_of(text, word_ends and words == NOT_BLANK)
    begin = lm.contexts.check_context(context_ids(lm, context), lm.max_length, name="context")
    log_share = math.log(given["max_rest"]) if given["max_rest"] else -math.inf
    if not data and not word_ends:
        return PrefixLogprob(0.0, -math.inf)
    is_between, asked = context is None or is_between_words(lm, begin), await in_form(lm)
    ways = _Ways(lm, data, word_ends, words, not is_between)
    best = np.full(ways.longest + 1, -np.inf)  # the most probable path of those that end at a byte
    found, paths = -math.inf, [_Path(0.0, b"", begin)]
    too_long, left = list[float](), given["max_contexts"]
    while True:
        missing = [*too_long, *(path.logprob for path in paths)]
        rest = float(np.logaddexp.reduce(missing)) if missing else -math.inf
        is_enough = rest <= log_share + np.logaddexp(found, rest)
        if not paths or not left or is_enough:
            return PrefixLogprob(min(found, 0.0), min(rest, 0.0))
        wave, paths = _most_promising(paths, best, log_share, min(left, lm.batch_size))
        left -= len(wave)
        questions = [question for path in wave for question in ways.questions(path)]
        answers = await _answered(asked, questions, given["lora_name"])
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


prefix_logprob_sync = blocking(prefix_logprob, "log-probability")


def _checked(lm: Any, options: SearchOptions) -> dict[str, Any]:
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    return checked_options(SearchOptions, options, "option of searches")


async def _answered(
    lm: AsyncLM, questions: Sequence[ContextReadout], lora_name: str | None
) -> Iterator[Any]:
    """Return the answers to a wave of questions, each a context with the readout of its row."""
    contexts, makers = [context for context, _ in questions], iter([make for _, make in questions])
    return iter(await lm.batch_read(contexts, lambda query: next(makers)(query), lora_name))


def _decoded(data: bytes, is_all: bool) -> str:
    """Return bytes as text; the last may be a part of a character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, is_all)


def _word_ends(lm: AsyncLM) -> NDArray[np.bool_]:
    """Return the tokens before which a word, or the text, has ended."""
    return word_begins(lm).unpacked().numpy() | lm.alphabet.ends


# -------------------------------------------------------------------- next words


_FEWEST: Final = 64
"""Least number of tokens to query after a context, however few queries are left."""

_LEAST: Final = 1e-6
"""Probability of a token from which on it is looked at whether a word ends in it, at the end."""


@final
class _Node:
    """The first tokens of a continuation, and what has not been explored after them."""

    def __init__(self, context: Context, data: bytes, probability: float, is_word: bool) -> None:
        self.context, self.data, self.is_word = context, data, is_word
        self.probability = self.rest = probability


@final
class _Explored:
    """Beginnings of continuations, and the words that have been found."""

    def __init__(self, lm: AsyncLM, words: Words, begin: Context, is_between: bool) -> None:
        self._lm, self._words, self._alphabet = lm, words, lm.alphabet
        self._is_default = words == NOT_BLANK
        self._begins, self._is_within = _word_ends(lm), self._is_default and not is_between
        self.begin = _Node(begin, b"", 1.0, False)
        self._nodes = [self.begin]
        self._next: list[tuple[float, int, _Node, int]] = []
        self._order = itertools.count()
        self._found: defaultdict[str, float] = defaultdict(float)
        self._end = 0.0

    @property
    def rest(self) -> float:
        return math.fsum(node.rest for node in self._nodes)

    def _groups(self, node: _Node) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the tokens that end the word or the text after a node, and those that go on."""
        alphabet = self._alphabet
        if node is self.begin and self._is_within:
            return alphabet.ends, alphabet.others & self._begins
        if node.is_word and self._is_default:
            return self._begins, alphabet.others & ~self._begins
        return alphabet.ends, alphabet.others

    def questions(self, node: _Node, num_tokens: int) -> list[ContextReadout]:
        """Return the questions about a node: the mass of both groups, and the top tokens."""
        size = len(self._lm.byte_vocab)
        readouts = masses_of(self._groups(node), size), top_of(num_tokens, size)
        return [(node.context, readout) for readout in readouts]

    def read(self, node: _Node, answers: Iterator[Any]) -> None:
        ending, going_on = next(answers).exp().tolist()
        top, scale = next(answers), node.probability
        if node is self.begin and self._is_within:  # given that the word before has ended
            scale = 1 / (ending + going_on) if ending + going_on else 0.0
        word, _ = self._first_word(node.data, is_all=True)
        if word:
            self._found[word] += scale * ending
        else:
            self._end += scale * ending
        node.rest = scale * going_on
        ids, logprobs = top.token_ids.numpy(), top.logprobs.numpy().astype(np.float64)
        own = self._groups(node)[1][ids] & np.isfinite(logprobs)
        negative = (-scale * np.exp(logprobs[own])).tolist()
        for item in zip(negative, self._order, itertools.repeat(node), ids[own].tolist()):
            heapq.heappush(self._next, item)

    def follow(self, size: float, least: float = 0.0) -> list[_Node]:
        """Follow the most probable tokens; return at most ``size`` nodes to query next."""
        found, max_length = list[_Node](), self._lm.max_length
        while self._next and len(found) < size and -self._next[0][0] >= least:
            negative, _, parent, token_id = heapq.heappop(self._next)
            probability = -negative
            data = parent.data + self._lm.byte_vocab[token_id].byte_string
            word, has_ended = self._first_word(data)
            if not has_ended and max_length is not None and len(parent.context) >= max_length:
                continue  # it is too long to be asked about, and stays in the rest
            parent.rest = max(parent.rest - probability, 0.0)
            if has_ended:
                self._found[word] += probability
            else:
                found.append(_Node(parent.context.extend(token_id), data, probability, word != ""))
                self._nodes.append(found[-1])
        return found

    def _first_word(self, data: bytes, is_all: bool = False) -> tuple[str, bool]:
        """Return the first word in some bytes, ``""`` for none, and whether it has ended."""
        text = _decoded(data, is_all)
        spans = spans_of(self._words, text) if text else []
        if not spans:
            return "", False
        start, stop = spans[0]
        return text[start:stop], is_all or stop < len(text)

    def best(self, n: int) -> Continuations:
        order = sorted(self._found.items(), key=lambda pair: (-pair[1], pair[0]))
        order = [(text, own) for text, own in order if own > 0]
        probabilities = [*(own for _, own in order[: n + 1]), 0.0]
        gaps = [a - b for a, b in itertools.pairwise(probabilities)][:n]
        rest = min(self.rest, 1.0)
        return Continuations(
            [Continuation(text, _log(own)) for text, own in order[:n]],
            context=self.begin.context,
            log_end=_log(self._end),
            log_rest=_log(rest),
            is_proven=all(gap > rest for gap in gaps) and (len(order) >= n or not rest),
        )


def _log(probability: float) -> float:
    return math.log(min(probability, 1.0)) if probability > 0 else -math.inf


# -------------------------------------------------------------------- prefixes


class _Path(NamedTuple):
    """Tokens that spell a beginning of the text."""

    logprob: float
    spelt: bytes
    context: Context


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


def _most_promising(
    paths: list[_Path], best: NDArray[np.float64], log_share: float, size: int
) -> tuple[list[_Path], list[_Path]]:
    """Return the paths to follow next, and the others."""
    # A path is compared with the most probable of those that have come as far or farther: by its
    # probability alone, short ones would all come first, and the end of a long text last.
    ahead = np.maximum.accumulate(best[::-1])[::-1].tolist()

    def promise(path: _Path) -> tuple[bool, float]:
        compared = path.logprob - max(ahead[len(path.spelt)], path.logprob)
        is_good = compared >= log_share
        return is_good, compared if is_good else path.logprob

    paths.sort(key=promise, reverse=True)
    num_good = sum(promise(path)[0] for path in paths[:size])
    size = num_good or size
    return paths[:size], paths[size:]


@final
class _Ways:
    """Token sequences that spell a text, or a text whose last word ends."""

    def __init__(
        self, lm: AsyncLM, data: bytes, word_ends: bool, words: Words, is_within: bool
    ) -> None:
        self._alphabet, self._byte_vocab, self._data = lm.alphabet, lm.byte_vocab, data
        self._words, self._word_ends = words, word_ends
        wanted = [data + blank for blank in BLANKS] if word_ends else [data]
        self.longest = max(map(len, wanted))  # a part of a character is no longer than blanks
        self._is_default = words == NOT_BLANK
        self._wanted = wanted if self._is_default else [data]
        if not self._is_default:
            self._text, self._spans = _spans_to_the_end(data, words)
        is_given = self._is_default and word_ends and is_within and data.startswith(BLANKS)
        self._given = _word_ends(lm) if is_given else None
        self._steps: Final = cache(self._steps_after)

    def _steps_after(self, spelt: bytes) -> tuple[list[tuple[int, bytes]], list[ReadoutOf]]:
        """Return the next tokens after some bytes with their spellings, and the readouts."""
        alphabet, size = self._alphabet, len(self._byte_vocab)
        rests = [own[len(spelt) :] for own in self._wanted if own.startswith(spelt)]
        parts = {r[:i] for r in rests for i in range(1, min(alphabet.longest + 1, len(r)))}
        tokens = [(i, spelt + part) for part in sorted(parts) for i in alphabet.spelling(part)]
        ending = np.zeros(size, np.bool_)
        if self._is_default:
            for rest in rests:
                ending |= alphabet.beginning_with(rest)
            is_end = self._word_ends and spelt == self._data
        else:
            rest = self._data[len(spelt) :]
            for i in np.flatnonzero(alphabet.beginning_with(rest)).tolist():
                own = spelt + self._byte_vocab[i].byte_string
                has_ended = self._has_ended(own)
                ending[i] = has_ended is True
                if has_ended is None:
                    tokens.append((i, own))
            is_end = not rest and self._has_ended(spelt, is_all=True)
        groups = [ending | alphabet.ends if is_end else ending]
        if self._given is not None and not spelt:  # the word before the text ends
            groups.append(self._given)
            tokens = [(i, own) for i, own in tokens if self._given[i]]
        readouts: list[ReadoutOf] = [masses_of(groups, size)]
        if tokens:
            readouts.append(chosen_of([token_id for token_id, _ in tokens], size))
        return tokens, readouts

    def _has_ended(self, spelt: bytes, is_all: bool = False) -> bool | None:
        """Return whether the text's last word has ended in some bytes; ``None`` if unknown yet."""
        text = _decoded(spelt, is_all)
        if text == self._text and not is_all:
            return None
        return spans_of(self._words, text)[: len(self._spans)] == self._spans

    def questions(self, path: _Path) -> list[ContextReadout]:
        return [(path.context, readout) for readout in self._steps(path.spelt)[1]]

    def followed(self, path: _Path, answers: Iterator[Any]) -> tuple[float, list[_Path]]:
        """Return the log-probability of all ends of a path, and the paths that go on from it."""
        tokens, readouts = self._steps(path.spelt)
        mass, *given = next(answers).tolist()
        before = path.logprob - sum(own for own in given if own > -math.inf)
        logprobs = next(answers).tolist() if len(readouts) > 1 else []
        return before + mass, [
            _Path(before + logprob, spelt, path.context.extend(token_id))
            for (token_id, spelt), logprob in zip(tokens, logprobs, strict=True)
        ]


def _spans_to_the_end(data: bytes, words: Words) -> tuple[str, list[Span]]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ContextError(f"text must be UTF-8 where words are given: {error}") from error
    spans = spans_of(words, text)
    if not spans or spans[-1][1] < len(text):
        raise ContextError(
            f"text must end with its last word where word_ends=True, got {shown(text)}, "
            f"whose words are at {spans}"
        )
    return text, spans
