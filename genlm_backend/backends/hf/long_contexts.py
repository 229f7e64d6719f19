"""LongContexts: contexts that a model has other rotary frequencies for than for shorter ones."""

from __future__ import annotations

import math
from typing import Any, cast, final

import torch

from genlm_backend.backends.hf.support import rotary_limit
from genlm_backend.model.query import Query
from genlm_backend.model.row import Row
from genlm_backend.model.scoring import Scoring
from genlm_backend.passes.job import Asked, Found
from genlm_backend.passes.passes import Passes


@final
class LongContexts:
    """Contexts beyond a limit, whose keys differ from those of shorter ones.

    They share no keys, values or pass with others.

    Args:
        passes: What runs the model.
        model: The model.

    Attributes:
        limit: Number of tokens up to which all contexts have the same frequencies; infinite for
            most models.
    """

    def __init__(self, passes: Passes, model: Any) -> None:
        limit = rotary_limit(model)
        self._passes, self.limit = passes, math.inf if limit is None else limit

    def answers(self, questions: list[Asked]) -> list[Found]:
        """Return the answers to questions of one adapter, those of long contexts apart."""
        limit = self.limit
        apart = [q for q in questions if len(q.context) > limit] if limit < math.inf else []
        if not apart:
            return self._passes.evaluate(questions)
        answers = {question: self._answer(question) for question in apart}
        others = [question for question in questions if question not in answers]
        if others:
            answers.update(zip(others, self._passes.evaluate(others), strict=True))
        return [answers[question] for question in questions]

    def row(self, query: Query) -> Row:
        """Return the row of a context that is run whole, whatever was run before.

        A model whose frequencies grow with its contexts keeps those of the longest until a short
        one comes.
        """
        if len(query.context) > self.limit:
            self._passes.whole([Query([0], query.adapter)])
        (row,) = self._passes.whole([query])
        return cast(Row, row)

    def _answer(self, question: Asked) -> Found:
        """Return the answer to a question about contexts that are longer than the limit."""
        if isinstance(question, Query):
            return self.row(question)
        text, limit = question.text, int(self.limit)
        scores: list[torch.Tensor] = []
        if question.start <= limit:
            up_to_limit = Scoring(text.prefix(limit + 1), question.start)
            scores.extend(cast(list[torch.Tensor], self._passes.evaluate([up_to_limit])))
        for end in range(max(question.start, limit + 1), len(text.token_ids)):
            row = self.row(text.prefix(end)).logprobs  # a model of its own for each length
            scores.append(row[text.token_ids[end]].cpu().unsqueeze(0))
        return torch.cat(scores)
