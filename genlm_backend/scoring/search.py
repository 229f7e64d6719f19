"""continuations: probable next words. prefix_logprob: probability that given bytes come next."""

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
    """A possible next word, and a lower bound of its log-probability.

    Attributes:
        text: The word, without the blanks around it; bytes that are not UTF-8 become ``"�"``.
        logprob: The log-probability of the word's tokenisations found so far, in nats: a lower
            bound, since the word may have part of the unexplored probability (``log_rest`` of
            ``Continuations``).
    """

    text: str
    logprob: float


@final
class Continuations(list[Continuation]):
    """The most probable next words that were found, the most probable first.

    Attributes:
        context: The token ids of the context.
        log_end: A lower bound of the log-probability that the text ends without another word.
        log_rest: The logarithm of the unexplored probability, which may belong to these words, to
            other words or to the text's end; ``-inf`` if all is explored.
        is_proven: Whether these are certainly the most probable words, in this order: each gap
            between consecutive probabilities exceeds the unexplored probability, and so does the
            gap to the best word left out. With fewer than ``n`` words, nothing may be unexplored.
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
        """The total probability of all words found, listed or not, and of the text's end."""
        return 1 - math.exp(self.log_rest)

    def __repr__(self) -> str:
        parts = (f"{own.text!r} {math.exp(own.logprob):.3g}" for own in itertools.islice(self, 6))
        more = ", …" if len(self) > 6 else ""
        return f"Continuations({', '.join(parts)}{more}; {self.explored:.1%} explored)"


class SearchOptions(TypedDict, total=False):
    """The options of ``continuations`` and ``prefix_logprob``, which document them."""

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
    """Return the most probable next words after a context, as for a cloze task.

    A word's probability sums over all token sequences that spell it and continue with a blank or
    the end of the text. If the context ends within a word, the probability is conditional on that
    word's end. ``surprisal`` computes the same probability for a single tokenisation. The
    probabilities of all words and of the text's end sum to one. The search follows the most
    probable tokens first; its queries share batches with the model's other queries.

    The unexplored probability (``log_rest`` is its logarithm) is exact up to rounding. So are the
    bounds of each word: its probability is at least the returned one, and at most that plus the
    unexplored probability.

    Args:
        lm: The model.
        context: A text or token ids; ``None`` for the tokenizer's BOS (``bos_token_id``). A text
            gets the BOS unless it begins with one, or begins with another special token and the
            tokenizer adds no BOS to texts. Token ids get none. End a text without a blank, since a
            blank belongs to the token of the next word.
        n: Number of words to return, at most.
        **options: ``words``, a regular expression of words, or a function from a text to the spans
            of its words; by default, blanks separate words. Your own ``words`` gets only the text
            after the context, so the rest of a word that the context begins is a word. A word
            ends as soon as a character follows it. ``max_rest``, the probability that may stay
            unexplored, from 0 to 1, and ``max_contexts``, the number of contexts to query at most:
            the search ends at the first of these limits. ``lora_name``, the LoRA adapter to use.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or the tokenizer names no BOS and
            ``context`` is ``None``.
        ContextError: (``ValueError``) If ``context`` cannot be encoded or is too long.
        Exception: Any error of ``next_token_logprobs``.
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
"""The default ``max_rest`` of ``prefix_logprob``: the unexplored share of the upper bound."""


@final
class PrefixLogprob(NamedTuple):
    """Bounds of the log-probability that a text begins with given bytes, in nats.

    Attributes:
        logprob: The logarithm of the probability found, a lower bound; ``-inf`` if it is 0.
        log_rest: Upper bound of the logarithm of the probability not found; ``-inf`` if all
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
    """Return the log-probability that the text after a context begins with ``text``.

    The probability sums over all tokenisations: token sequences that spell the text, or spell a
    prefix of it and continue with a token that begins with the rest. Any text may follow, so the
    probability of ``" cat"`` includes that of ``" category"``. Special tokens, tokens that end
    texts and tokens without bytes do not continue the text.

    The search first follows sequences that are probable for their length; its queries share
    batches with the model's other queries. Both bounds are exact up to rounding. Very many
    improbable sequences together may be as probable as a long text, so the upper bound for a text
    of many words may be loose although the lower bound is tight.

    Args:
        lm: The model.
        context: A text, token ids, or ``None``, as for ``continuations``.
        text: The bytes, or a string, which is encoded as UTF-8. Include the blank before its first
            word, if there is one.
        word_ends: Whether the last word of ``text`` has to end, with a blank or the whole text's
            end after it, as in ``continuations``. ``" cat"`` then has the probability of the word
            ``"cat"`` after one blank, without that of ``" category"``. If the context ends within
            a word and ``text`` begins with a blank, the result is conditional on that word's end.
        **options: ``words``, the definition of a word, as for ``continuations`` (only with
            ``word_ends=True``). With your own ``words``, the last word ends as soon as a character
            follows that is not part of it, and the result is not conditional on a word's end.
            ``max_rest``, the share of the upper bound that may be unexplored, from 0 to 1, and
            ``max_contexts``, the number of contexts to query at most: the search ends at the first
            of these limits. To find a tokenisation of ``n`` tokens takes at least ``n`` contexts.
            ``lora_name``, the LoRA adapter to use.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or the tokenizer names no BOS and
            ``context`` is ``None``; or if ``words`` is given without ``word_ends=True``.
        ContextError: (``ValueError``) If ``context`` or ``text`` cannot be encoded, ``context`` is
            too long, or ``text`` does not end with a word although ``word_ends=True``.
        Exception: Any error of ``next_token_logprobs``.
    """
    word_ends = switch("word_ends", word_ends)
    given = _checked(lm, {"max_rest": _MAX_REST, **options})
    words: Words = given["words"]
    if words != NOT_BLANK and not word_ends:
        raise OptionError("words applies only with word_ends=True")
    data = _bytes_of(text, word_ends and words == NOT_BLANK)
    begin = lm.contexts.check_context(context_ids(lm, context), lm.max_length, name="context")
    log_share = math.log(given["max_rest"]) if given["max_rest"] else -math.inf
    if not data and not word_ends:
        return PrefixLogprob(0.0, -math.inf)
    is_between, asked = context is None or is_between_words(lm, begin), await in_form(lm)
    ways = _Ways(lm, data, word_ends, words, not is_between)
    best = np.full(ways.longest + 1, -np.inf)  # largest log-probability by bytes spelt
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
    """Return an iterator of the answers to ``questions``, which go to the model in one call."""
    contexts, makers = [context for context, _ in questions], iter([make for _, make in questions])
    return iter(await lm.batch_read(contexts, lambda query: next(makers)(query), lora_name))


def _decoded(data: bytes, is_all: bool) -> str:
    """Decode UTF-8, invalid bytes as "�"; unless ``is_all``, drop an incomplete last character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, is_all)


def _word_ends(lm: AsyncLM) -> NDArray[np.bool_]:
    """Return a mask of the tokens that end the word before them, by a blank or the text's end."""
    return word_begins(lm).unpacked().numpy() | lm.alphabet.ends


# -------------------------------------------------------------------- next words


_FEWEST: Final = 64
"""Least number of top tokens to request per context, however few contexts are left to query."""

_LEAST: Final = 1e-6
"""After the last query, continuations at least this probable are still checked for word ends."""


@final
class _Node:
    """The first tokens of a continuation, and the probability unexplored after them."""

    def __init__(self, context: Context, data: bytes, probability: float, is_word: bool) -> None:
        self.context, self.data, self.is_word = context, data, is_word
        self.probability = self.rest = probability


@final
class _Explored:
    """The search state of ``continuations``: its nodes, and the words found so far."""

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
        """Return two masks: tokens that end the node's word or the text, and tokens to follow."""
        alphabet = self._alphabet
        if node is self.begin and self._is_within:
            return alphabet.ends, alphabet.others & self._begins
        if node.is_word and self._is_default:
            return self._begins, alphabet.others & ~self._begins
        return alphabet.ends, alphabet.others

    def questions(self, node: _Node, num_tokens: int) -> list[ContextReadout]:
        """Return a node's two queries: for the masses of its groups, and for its top tokens."""
        size = len(self._lm.byte_vocab)
        readouts = masses_of(self._groups(node), size), top_of(num_tokens, size)
        return [(node.context, readout) for readout in readouts]

    def read(self, node: _Node, answers: Iterator[Any]) -> None:
        ending, going_on = next(answers).exp().tolist()
        top, scale = next(answers), node.probability
        if node is self.begin and self._is_within:  # given that the context's word ends
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
        """Follow the best tokens down to probability ``least``; return up to ``size`` new nodes."""
        found, max_length = list[_Node](), self._lm.max_length
        while self._next and len(found) < size and -self._next[0][0] >= least:
            negative, _, parent, token_id = heapq.heappop(self._next)
            probability = -negative
            data = parent.data + self._lm.byte_vocab[token_id].byte_string
            word, has_ended = self._first_word(data)
            if not has_ended and max_length is not None and len(parent.context) >= max_length:
                continue  # too long for the model, so its probability stays in the rest
            parent.rest = max(parent.rest - probability, 0.0)
            if has_ended:
                self._found[word] += probability
            else:
                found.append(_Node(parent.context.extend(token_id), data, probability, word != ""))
                self._nodes.append(found[-1])
        return found

    def _first_word(self, data: bytes, is_all: bool = False) -> tuple[str, bool]:
        """Return the first word in ``data``, ``""`` for none, and whether it has ended."""
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
    """Tokens that spell a prefix of the wanted text, with their log-probability."""

    logprob: float
    spelt: bytes
    context: Context


def _bytes_of(text: Any, word_ends: bool) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise OptionTypeError(f"text must be a string or bytes, got {shown(text)}")
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError as error:
        raise ContextError(f"text cannot be encoded as UTF-8: {error}") from error
    if word_ends and ends_blank(data):
        raise ContextError(
            f"text must end with a word if word_ends=True, and not with a blank: got {shown(text)}"
        )
    return data


def _most_promising(
    paths: list[_Path], best: NDArray[np.float64], log_share: float, size: int
) -> tuple[list[_Path], list[_Path]]:
    """Return the paths to follow next, and the remaining paths."""
    # Compare a path with the most probable path that spells as many bytes or more. By probability
    # alone, all short paths would come first, and paths near the end of a long text last.
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
    """Token sequences that spell a text; with ``word_ends``, they also end its last word."""

    def __init__(
        self, lm: AsyncLM, data: bytes, word_ends: bool, words: Words, is_within: bool
    ) -> None:
        self._alphabet, self._byte_vocab, self._data = lm.alphabet, lm.byte_vocab, data
        self._words, self._word_ends = words, word_ends
        wanted = [data + blank for blank in BLANKS] if word_ends else [data]
        # Most bytes of a path. With the caller's ``words``, a path may end with a part of the
        # character after the text. The part has at most 3 bytes, as many as the longest blank.
        self.longest = max(map(len, wanted))
        self._is_default = words == NOT_BLANK
        self._wanted = wanted if self._is_default else [data]
        if not self._is_default:
            self._text, self._spans = _spans_to_the_end(data, words)
        is_given = self._is_default and word_ends and is_within and data.startswith(BLANKS)
        self._given = _word_ends(lm) if is_given else None
        self._steps: Final = cache(self._steps_after)

    def _steps_after(self, spelt: bytes) -> tuple[list[tuple[int, bytes]], list[ReadoutOf]]:
        """Return the tokens to try next, each with ``spelt`` plus its bytes, and the readouts."""
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
        if self._given is not None and not spelt:  # given that the context's word ends
            groups.append(self._given)
            tokens = [(i, own) for i, own in tokens if self._given[i]]
        readouts: list[ReadoutOf] = [masses_of(groups, size)]
        if tokens:
            readouts.append(chosen_of([token_id for token_id, _ in tokens], size))
        return tokens, readouts

    def _has_ended(self, spelt: bytes, is_all: bool = False) -> bool | None:
        """Return whether the text's last word has ended in ``spelt``; ``None`` if not known yet."""
        text = _decoded(spelt, is_all)
        if text == self._text and not is_all:
            return None
        return spans_of(self._words, text)[: len(self._spans)] == self._spans

    def questions(self, path: _Path) -> list[ContextReadout]:
        return [(path.context, readout) for readout in self._steps(path.spelt)[1]]

    def followed(self, path: _Path, answers: Iterator[Any]) -> tuple[float, list[_Path]]:
        """Return the log-probability that a token completes ``path``, and the longer paths."""
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
        raise ContextError(f"text must be UTF-8 if words is given: {error}") from error
    spans = spans_of(words, text)
    if not spans or spans[-1][1] < len(text):
        raise ContextError(
            f"text must end with a word if word_ends=True, got {shown(text)}, "
            f"whose words are at {spans}"
        )
    return text, spans
