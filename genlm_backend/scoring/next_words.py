"""continuations: the most probable words behind a context, by all tokenisations."""

from __future__ import annotations

import codecs
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.checks import checked, instance, integer, number
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.context import Context
from genlm_backend.model.query import TokenIds
from genlm_backend.model.token_readouts import TopTokens, masses_of, top_of
from genlm_backend.scoring.search import Question, Search, searched, searched_sync
from genlm_backend.scoring.words import (
    NOT_BLANK,
    Words,
    check_words,
    context_ids,
    is_between_words,
    spans_of,
    word_begins,
)


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


async def continuations(
    lm: AsyncLM,
    context: str | TokenIds | None,
    n: int = 10,
    *,
    words: Words = NOT_BLANK,
    max_rest: float = 0.05,
    max_contexts: int = 200,
    lora_name: str | None = None,
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
        words: What a word is: a regular expression or a function from a text to the spans of its
            words, by default what blanks separate. With words of your own, the first one in what
            comes behind the context is meant, whether or not the context ends within a word; it
            has ended as soon as a character follows it.
        max_rest: The probability that may be left unexplored, from 0 to 1; at it the search ends.
        max_contexts: Number of contexts to ask about at most; at it the search ends, too.
        lora_name: The adapter to read with.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or the tokenizer names no token
            that texts begin with and ``context`` is ``None``.
        ContextError: (``ValueError``) If ``context`` cannot be read.
        Exception: What ``next_token_logprobs`` raises.
    """
    search = _search(lm, context, n, words, max_rest, max_contexts)
    return await searched(lm, search, lora_name)


def continuations_sync(
    lm: AsyncLM,
    context: str | TokenIds | None,
    n: int = 10,
    *,
    words: Words = NOT_BLANK,
    max_rest: float = 0.05,
    max_contexts: int = 200,
    lora_name: str | None = None,
) -> Continuations:
    """Return the same words as ``continuations``, blocking the calling thread."""
    search = _search(lm, context, n, words, max_rest, max_contexts)
    return searched_sync(lm, search, lora_name)


_CHECKS: Final = {"n": integer(1), "max_rest": number(0, 1), "max_contexts": integer(1)}


def _search(
    lm: Any, context: Any, n: Any, words: Any, max_rest: Any, max_contexts: Any
) -> Search[Continuations]:
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    bounds = {"n": n, "max_rest": max_rest, "max_contexts": max_contexts}
    given = checked(_CHECKS, bounds)
    words = check_words(words)
    begin = lm.contexts.check(context_ids(lm, context), lm.max_length, name="context")
    is_within = words == NOT_BLANK and not (context is None or is_between_words(lm, begin))
    explored = _Explored(lm, words, begin, is_within)
    wave, left = [explored.begin], given["max_contexts"]
    while wave:
        num_tokens = min(max(left, _FEWEST), len(lm.byte_vocab))
        answers = iter((yield [q for node in wave for q in explored.questions(node, num_tokens)]))
        for node in wave:
            explored.read(node, next(answers).exp().tolist(), next(answers))
        left -= len(wave)
        is_enough = not left or explored.rest <= given["max_rest"]
        wave = [] if is_enough else explored.most_probable(min(left, lm.batch_size))
    explored.settle()
    return explored.best(given["n"])


_FEWEST: Final = 64
"""Tokens that are looked at behind a context at least, however few contexts may still be asked."""

_LEAST: Final = 1e-6
"""Probability of a token from which on it is looked at whether a word ends in it, at the end."""


@final
class _Node:
    """The first tokens of a continuation, with its next tokens, the most probable first."""

    def __init__(self, context: Context, data: bytes, probability: float, is_word: bool) -> None:
        self.context, self.data, self.is_word = context, data, is_word
        self.probability = self.rest = probability
        self.token_ids: list[int] = []
        self.probabilities: list[float] = []


@final
class _Explored:
    """The beginnings of what may come, and the words that have been found."""

    def __init__(self, lm: AsyncLM, words: Words, begin: Context, is_within: bool) -> None:
        self._lm, self._words, self._is_within = lm, words, is_within
        self._alphabet = lm.alphabet
        self._begins: NDArray[np.bool_] = word_begins(lm).unpacked().numpy() | self._alphabet.ends
        self.begin = _Node(begin, b"", 1.0, False)
        self._nodes = [self.begin]
        self._next: list[tuple[float, int, _Node, int]] = []
        self._order = itertools.count()
        self._found: defaultdict[str, float] = defaultdict(float)
        self._end = 0.0

    @property
    def rest(self) -> float:
        """The probability that has not been explored."""
        return math.fsum(node.rest for node in self._nodes)

    def _groups(self, node: _Node) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the tokens that end the word or the text behind a node, and those that go on."""
        alphabet = self._alphabet
        if node is self.begin and self._is_within:
            return alphabet.ends, alphabet.others & self._begins
        if node.is_word and self._words == NOT_BLANK:
            return self._begins, alphabet.others & ~self._begins
        return alphabet.ends, alphabet.others

    def questions(self, node: _Node, num_tokens: int) -> list[Question]:
        """Return the questions of a node: how probable both kinds of tokens are, and which."""
        size = len(self._lm.byte_vocab)
        masses = masses_of(self._groups(node), size)
        return [(node.context, masses), (node.context, top_of(num_tokens, size))]

    def read(self, node: _Node, masses: Sequence[float], top: TopTokens) -> None:
        """Take the answers to the questions of a node."""
        ending, going_on = masses
        scale = node.probability
        if node is self.begin and self._is_within:  # given that the word before has ended
            scale = 1 / (ending + going_on) if ending + going_on else 0.0
        word = self._first_word(node.data, is_all=True)
        if word is None:
            self._end += scale * ending
        else:
            self._found[word.text] += scale * ending
        node.rest = scale * going_on
        ids, logprobs = top.token_ids.numpy(), top.logprobs.numpy().astype(np.float64)
        own = self._groups(node)[1][ids] & np.isfinite(logprobs)
        node.token_ids = ids[own].tolist()
        node.probabilities = (scale * np.exp(logprobs[own])).tolist()
        self._push(node, 0)

    def _push(self, node: _Node, index: int) -> None:
        """Put a node's token among those that are followed next; its others come behind it."""
        if index < len(node.token_ids):
            item = -node.probabilities[index], next(self._order), node, index
            heapq.heappush(self._next, item)

    def most_probable(self, size: int) -> list[_Node]:
        """Return the nodes to ask about next, at most ``size``."""
        found = list[_Node]()
        while self._next and len(found) < size:
            node = self._followed()
            if node is not None:
                found.append(node)
        return found

    def settle(self) -> None:
        """Find the words that end in a token which nothing more has to be asked for."""
        while self._next and -self._next[0][0] >= _LEAST:
            self._followed()

    def _followed(self) -> _Node | None:
        """Return the node behind the most probable token, unless the word has ended in the token.

        A context that is longer than the model takes cannot be asked about and stays in the rest.
        """
        _, _, parent, index = heapq.heappop(self._next)
        self._push(parent, index + 1)
        token_id, probability = parent.token_ids[index], parent.probabilities[index]
        data = parent.data + self._lm.byte_vocab[token_id].byte_string
        word, max_length = self._first_word(data), self._lm.max_length
        has_ended = word is not None and word.has_ended
        if not has_ended and max_length is not None and len(parent.context) >= max_length:
            return None
        parent.rest = max(parent.rest - probability, 0.0)
        if word is not None and word.has_ended:
            self._found[word.text] += probability
            return None
        context = parent.context.extend(token_id)
        node = _Node(context, data, probability, word is not None)
        self._nodes.append(node)
        return node

    def _first_word(self, data: bytes, is_all: bool = False) -> _Word | None:
        """Return the first word in some bytes; parts of a character may be the last of them."""
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, is_all)
        spans = spans_of(self._words, text) if text else []
        if not spans:
            return None
        start, stop = spans[0]
        return _Word(text[start:stop], is_all or stop < len(text))

    def best(self, n: int) -> Continuations:
        """Return the ``n`` most probable words that have been found."""
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


class _Word(NamedTuple):
    """A word, and whether something comes behind it that is none of it."""

    text: str
    has_ended: bool


def _log(probability: float) -> float:
    return math.log(min(probability, 1.0)) if probability > 0 else -math.inf
