"""Scores of texts by way of rows, for models that score nothing themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import final

import torch

from genlm_backend.model.query import Query
from genlm_backend.model.scoring import Scoring


async def scores_of_rows(
    scorings: Sequence[Scoring],
    ask: Callable[[list[Query]], Awaitable[torch.Tensor]],
    chunk_size: int,
) -> list[torch.Tensor]:
    """Return the scores of texts.

    Args:
        scorings: The texts.
        ask: Returns the rows of queries: ``[n, vocab]``.
        chunk_size: Number of rows to ask for at once, at most.
    """
    scores = RowScores(scorings, chunk_size)
    for queries in scores.chunks():
        scores.put(await ask(queries))
    return scores.tensors()


def scores_of_rows_sync(
    scorings: Sequence[Scoring],
    ask: Callable[[list[Query]], torch.Tensor],
    chunk_size: int,
) -> list[torch.Tensor]:
    """Return the same scores as ``scores_of_rows``, from rows that nobody has to await."""
    scores = RowScores(scorings, chunk_size)
    for queries in scores.chunks():
        scores.put(ask(queries))
    return scores.tensors()


@final
class RowScores:
    """Scores of texts from the rows of their prefixes, a chunk of rows at a time.

    Args:
        scorings: The texts.
        chunk_size: Number of rows that are asked for at once, at most.
    """

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
