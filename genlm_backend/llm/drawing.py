"""Drawing: the next token of a sample, asked for instead of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from genlm_backend.llm.context import Context
from genlm_backend.llm.draw import as_scores, draw_token
from genlm_backend.llm.query import Adapter, Query
from genlm_backend.llm.row import Row


@final
@dataclass(frozen=True, slots=True)
class Drawing:
    """A context, and the random number that its next token is drawn by.

    The answer is a token id: the one that ``draw_token`` returns of the context's row. So it is the
    same wherever it is drawn, and equal drawings have equal answers.

    Attributes:
        query: The context, and the adapter to read it with.
        temperature: Divisor of the log-probabilities; 0 takes the first of the most probable.
        uniform: A number from 0 up to, and not including, 1.
    """

    query: Query
    temperature: float
    uniform: float

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to read the context with, or ``None`` for the base model."""
        return self.query.adapter

    @property
    def context(self) -> Context:
        """The tokens that the model has to read."""
        return self.query.context

    def of_row(self, row: Row) -> int:
        """Return the answer, given the context's row.

        Raises:
            EvaluationError: (``RuntimeError``) If the row is NaN, or no token is possible.
        """
        return draw_token(as_scores(row.logprobs), self.temperature, lambda: self.uniform)

    def is_answered_by(self, answer: Any) -> bool:
        """Return whether ``answer`` is a token id."""
        return type(answer) is int and answer >= 0
