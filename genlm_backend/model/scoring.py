"""Scoring: a text whose tokens' log-probabilities are asked for, instead of a row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch

from genlm_backend.checks import listed
from genlm_backend.errors import OptionError
from genlm_backend.model.context import Context, Contexts
from genlm_backend.model.query import Adapter, Query
from genlm_backend.model.readout import Readout


@final
@dataclass(frozen=True, slots=True)
class Scoring:
    """A text and the token from which on it is scored. Equal scorings have equal answers.

    The answer is float32 ``[num_targets]``: for each token from ``start`` on, the log-probability
    that the row of the tokens before it gives it.

    Attributes:
        text: All tokens, prompt and continuation, and the adapter to read them with.
        start: Number of tokens of the prompt; at least 1.
    """

    text: Query
    start: int

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to read the text with, or ``None`` for the base model."""
        return self.text.adapter

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens whose log-probabilities are wanted."""
        return tuple(self.text.context.packed(self.start))

    @property
    def num_targets(self) -> int:
        """Number of log-probabilities that are wanted."""
        return len(self.text.context) - self.start

    @property
    def context(self) -> Context:
        """The tokens that the model has to read: all but the last."""
        return self.text.context[:-1]

    def is_answered_by(self, answer: Any) -> bool:
        """Return whether ``answer`` has one log-probability for each target, as callers get it."""
        is_tensor = isinstance(answer, torch.Tensor) and answer.dtype is torch.float32
        return is_tensor and answer.shape == (self.num_targets,) and not answer.requires_grad


Question: TypeAlias = Query | Scoring | Readout
"""A question to an evaluator: a context's row, a text's scores, or what is read off a row."""

Answer: TypeAlias = Any
"""The answer: a ``Row`` to a query, scores to a scoring, of a readout what its kind says."""


TOKENS_PER_ROW: Final = 200
"""Tokens of a text that is scored that count for as much in a batch as a context does."""


def weight(question: Question) -> float:
    """Return the weight of a question in a batch: 1 for a row, and for a text by its length.

    A batch of short texts would be too small a pass otherwise, and one of long texts too large.
    """
    if isinstance(question, Scoring):
        return len(question.text.context) / TOKENS_PER_ROW
    return 1.0


def check_scorings(
    contexts: Contexts,
    prompts: Any,
    continuations: Any,
    max_length: int | None = None,
    adapter: Adapter | None = None,
) -> list[Scoring]:
    """Return the scorings of continuations, each behind its own prompt.

    The longest context that one asks about, which is the text without its last token, has to fit.

    Raises:
        OptionTypeError: If prompts or continuations are no list.
        OptionError: If these are not of one length.
        ContextTypeError: If a prompt or a continuation is not integers.
        ContextError: If a prompt is empty, an id is outside the vocabulary, it is another model's
            ``Context``, or a text has more tokens than ``max_length`` before its last one.
    """
    before, behind = listed("prompts", prompts), listed("continuations", continuations)
    if len(before) != len(behind):
        raise OptionError(
            "prompts and continuations belong together one by one, "
            f"got {len(before)} prompts and {len(behind)} continuations"
        )
    scorings = []
    for prompt, continuation in zip(before, behind, strict=True):
        context = contexts.check(prompt, max_length, name="prompt")
        text = context.followed_by(contexts.packed(continuation, name="continuation"))
        if len(text) > len(context):
            contexts.check(text[:-1], max_length)
        scorings.append(Scoring(Query(text, adapter), len(context)))
    return scorings


def distinct(scorings: Sequence[Scoring]) -> list[Scoring]:
    """Return the distinct ones of some scorings that ask for anything."""
    return [scoring for scoring in dict.fromkeys(scorings) if scoring.num_targets]


def own_scores(
    scorings: Sequence[Scoring], found: Mapping[Scoring, torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Return the scores of each text on ``device``, copied for a caller to modify."""
    nothing = torch.empty(0, dtype=torch.float32)
    return [found.get(scoring, nothing).to(device, copy=True) for scoring in scorings]


async def scores_of_rows(
    scorings: Sequence[Scoring],
    ask: Callable[[list[Query]], Awaitable[torch.Tensor]],
    chunk_size: int,
) -> list[torch.Tensor]:
    """Return the scores of texts by way of rows, for models that score nothing themselves.

    Args:
        scorings: The texts.
        ask: Returns the rows of queries: ``[n, vocab]``.
        chunk_size: Number of rows to ask for at once, at most.
    """
    scores = _RowScores(scorings, chunk_size)
    for queries in scores.chunks():
        scores.put(await ask(queries))
    return scores.tensors()


def scores_of_rows_sync(
    scorings: Sequence[Scoring], ask: Callable[[list[Query]], torch.Tensor], chunk_size: int
) -> list[torch.Tensor]:
    """Return the same scores as ``scores_of_rows``, from rows that nobody has to await."""
    scores = _RowScores(scorings, chunk_size)
    for queries in scores.chunks():
        scores.put(ask(queries))
    return scores.tensors()


@final
class _RowScores:
    """Scores of texts from the rows of their prefixes, a chunk of rows at a time."""

    def __init__(self, scorings: Sequence[Scoring], chunk_size: int) -> None:
        self._scorings = scorings
        self._chunk_size = chunk_size
        self._targets: list[int] = []
        self._found: list[torch.Tensor] = []

    def chunks(self) -> Iterator[list[Query]]:
        """Yield the queries of each chunk, whose rows are to be put in before the next one."""
        places = [
            (scoring.text, end)
            for scoring in self._scorings
            for end in range(scoring.start, len(scoring.text.context))
        ]
        for begin in range(0, len(places), self._chunk_size):
            chunk = places[begin : begin + self._chunk_size]
            self._targets = [text.token_ids[end] for text, end in chunk]
            yield [text.prefix(end) for text, end in chunk]

    def put(self, rows: torch.Tensor) -> None:
        """Take the targets' log-probabilities from the rows of the last chunk: ``[n, vocab]``."""
        targets = torch.tensor(self._targets, dtype=torch.int64, device=rows.device)
        self._found.append(rows.gather(1, targets[:, None])[:, 0].float())

    def tensors(self) -> list[torch.Tensor]:
        """Return the scores of each text, once all rows were put in."""
        found = torch.cat(self._found) if self._found else torch.empty(0, dtype=torch.float32)
        parts = found.split([scoring.num_targets for scoring in self._scorings])
        return [part.clone() for part in parts]  # each with memory of its own
