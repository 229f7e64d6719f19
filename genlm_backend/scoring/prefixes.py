"""prefix_logprob: how probable a text is that begins with some bytes, by all tokenisations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.checks import checked, instance, integer, number, shown
from genlm_backend.errors import ContextError, OptionTypeError
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.context import Context
from genlm_backend.model.query import TokenIds
from genlm_backend.model.token_readouts import ReadoutOf, chosen_of, masses_of
from genlm_backend.scoring.search import Question, Search, searched, searched_sync
from genlm_backend.scoring.words import context_ids


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


async def prefix_logprob(
    lm: AsyncLM,
    context: str | TokenIds | None,
    text: str | bytes,
    *,
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
            with. They are taken as these tokens and no others.
        text: The bytes; a string is taken as UTF-8. A word that follows another begins with its
            blank.
        max_rest: The part of the answer that may be missing, from 0 on; at it the search ends.
        max_contexts: Number of contexts to ask about at most; at it the search ends, too. A text
            takes one for each of its tokens at least, or nothing is found.
        lora_name: The adapter to read with.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or the tokenizer names no token
            that texts begin with and ``context`` is ``None``.
        ContextError: (``ValueError``) If ``context`` or ``text`` cannot be read.
        Exception: What ``next_token_logprobs`` raises.
    """
    search = _search(lm, context, text, max_rest, max_contexts)
    return await searched(lm, search, lora_name)


def prefix_logprob_sync(
    lm: AsyncLM,
    context: str | TokenIds | None,
    text: str | bytes,
    *,
    max_rest: float = 0.01,
    max_contexts: int = 200,
    lora_name: str | None = None,
) -> PrefixLogprob:
    """Return the same log-probability as ``prefix_logprob``, blocking the calling thread."""
    search = _search(lm, context, text, max_rest, max_contexts)
    return searched_sync(lm, search, lora_name)


_CHECKS: Final = {"max_rest": number(0, 1), "max_contexts": integer(1)}


class _Path(NamedTuple):
    """Tokens that spell a beginning of a text.

    Attributes:
        logprob: Their log-probability.
        offset: Number of bytes that they spell.
        context: The context, and these tokens.
    """

    logprob: float
    offset: int
    context: Context


def _search(
    lm: Any, context: Any, text: Any, max_rest: Any, max_contexts: Any
) -> Search[PrefixLogprob]:
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    given = checked(_CHECKS, {"max_rest": max_rest, "max_contexts": max_contexts})
    data = _bytes_of(text)
    begin = lm.contexts.check(context_ids(lm, context), lm.max_length, name="context")
    log_share = math.log(given["max_rest"]) if given["max_rest"] else -math.inf
    ways = _Ways(lm, data)
    best = np.full(len(data) + 1, -np.inf)  # the most probable path of those that end at a byte
    found = -math.inf if data else 0.0
    paths = [_Path(0.0, 0, begin)] if data else []
    too_long, left = list[float](), given["max_contexts"]
    while True:
        rest = _log_sum([*too_long, *(path.logprob for path in paths)])
        is_enough = rest <= log_share + np.logaddexp(found, rest)
        if not paths or not left or is_enough:
            return PrefixLogprob(min(found, 0.0), rest)
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
                    best[child.offset] = max(best[child.offset], child.logprob)
        best[-1] = found


def _bytes_of(text: Any) -> bytes:
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise ContextError(f"text must be of characters: {error}") from error
    if not isinstance(text, bytes):
        raise OptionTypeError(f"text must be a string or bytes, got {shown(text)}")
    return bytes(text)


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
        compared = path.logprob - max(ahead[path.offset], path.logprob)
        is_good = compared >= log_share
        return is_good, compared if is_good else path.logprob

    paths.sort(key=promise, reverse=True)
    num_good = sum(promise(path)[0] for path in paths[:size])
    size = num_good or size
    return paths[:size], paths[size:]


@final
class _Ways:
    """The tokens that may come behind each number of bytes of a text."""

    def __init__(self, lm: AsyncLM, data: bytes) -> None:
        self._alphabet, self._size, self._data = lm.alphabet, len(lm.byte_vocab), data
        self._steps: Final = cache(self._steps_at)

    def _steps_at(self, offset: int) -> tuple[list[tuple[int, int]], list[ReadoutOf]]:
        """Return the tokens that spell some of the rest, with what is spelt then, and readouts.

        The first readout is that of all tokens that begin with the rest, if there are any.
        """
        rest, alphabet = self._data[offset:], self._alphabet
        most = min(alphabet.longest, len(rest) - 1)
        steps = [
            (token_id, offset + size)
            for size in range(1, most + 1)
            for token_id in alphabet.spelling(rest[:size])
        ]
        beyond = [] if len(rest) > alphabet.longest else [alphabet.beginning_with(rest)]
        readouts: list[ReadoutOf] = [masses_of(beyond, self._size)]
        if steps:
            readouts.append(chosen_of([token_id for token_id, _ in steps], self._size))
        return steps, readouts

    def questions(self, path: _Path) -> list[Question]:
        """Return the questions that are asked behind a path."""
        return [(path.context, readout) for readout in self._steps(path.offset)[1]]

    def followed(self, path: _Path, answers: Iterator[Any]) -> tuple[float, list[_Path]]:
        """Return the log-probability of all ends of a path, and the paths that go on from it."""
        masses = next(answers).tolist()
        mass = path.logprob + masses[0] if masses else -math.inf
        steps, readouts = self._steps(path.offset)
        logprobs = next(answers).tolist() if len(readouts) > 1 else []
        return mass, [
            _Path(path.logprob + logprob, offset, path.context.extend(token_id))
            for (token_id, offset), logprob in zip(steps, logprobs, strict=True)
        ]
