"""WholeLM: a model over an evaluator that can run a context whole."""

from __future__ import annotations

from typing import Any, cast

import torch

from genlm_backend.model.batched_lm import BatchedLM
from genlm_backend.queries.query import TokenIds


class WholeLM(BatchedLM):
    """A model whose evaluator has ``evaluate_whole``."""

    def next_token_logprobs_uncached(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the row of a context run whole and alone, past every cache: float32 ``[vocab]``.

        For checking the cache's answers, or timing a plain forward pass. Blocks the thread.
        """
        query, evaluator = self._query(token_ids, lora_name), cast(Any, self._evaluator)
        row = self._call_for(query, lambda: evaluator.evaluate_whole(query))
        return self._answering.defined(row).copy_logprobs(self.output_device)
