"""MockAsyncLM: rows without a model, for testing one's own program."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from genlm_backend.llm.batched import BatchedLM
from genlm_backend.llm.query import Query


class MockAsyncLM(BatchedLM):
    """A pseudo-random language model: a row depends on its context and on nothing else.

    Rows are the log-softmax of standard normal logits, seeded by a 384-bit digest of the
    context, so that equal contexts have equal rows on every machine and no two contexts share
    one by accident. Awaits take the same road as with a real model: batching, caching, errors.

    Args:
        tokenizer: Anything that ``decode_vocab`` takes.
        **kwargs: As for ``BatchedLM``: ``batch_size``, ``timeout``, ``row_cache_bytes``, …
    """

    def __init__(self, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        self._undefined = sorted(self.undefined_ids)

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> Self:
        """Mock the model of that name: its tokenizer, no weights.

        Args:
            model_name: As for ``load_model_by_name``.
            **kwargs: As for the constructor.
        """
        from genlm_backend.llm.loading import load_tokenizer

        cls.check_options(kwargs)
        return cls(load_tokenizer(model_name), **kwargs)

    can_forget = True  # there is nothing to forget

    def evaluate(self, queries: list[Query]) -> Sequence[torch.Tensor]:
        """Return one pseudo-random row for each query."""
        return [self._row(query) for query in queries]

    def _row(self, query: Query) -> torch.Tensor:
        digest = hashlib.sha384(array("q", query.token_ids).tobytes()).digest()
        words = np.frombuffer(digest, dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=words[:2], counter=words[2:]))
        logits = torch.from_numpy(random.standard_normal(len(self.byte_vocab), dtype=np.float32))
        logits[self._undefined] = -torch.inf
        return logits.log_softmax(-1)
