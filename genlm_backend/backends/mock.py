"""MockAsyncLM: pseudo-random rows without a model, to test programs."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self, Unpack, final

import numpy as np
import torch

from genlm_backend.checks import Check, integer, optional, sequence, shows_options
from genlm_backend.model.batched_lm import BatchedLM, LMOptions
from genlm_backend.queries.evaluator import StatelessEvaluator
from genlm_backend.queries.query import RowQuery
from genlm_backend.queries.row import Row, RowCache, rows_of_logits
from genlm_backend.tokenization import decode_vocab


class MockAsyncLM(BatchedLM):
    """A pseudo-random language model: a row depends only on its context and ``vocab_size``.

    Rows are the log-softmax of standard normal logits, seeded by a 384-bit digest of the
    context: equal contexts get equal rows in every process, and distinct contexts practically
    never do. Batching and the row cache work as with a real model. There is no KV cache, and
    adapters and pictures are refused.

    Args:
        tokenizer: Anything that ``decode_vocab`` takes.
        vocab_size: Width of the rows. Default: the tokenizer's vocabulary size.
        max_length: Longest context to accept, in tokens.
        max_batch_size: Maximum number of contexts evaluated at once; ``None`` for no bound.
        eos_token_ids: The ids that end a text in a call that gives none. Default: the tokenizer's.
        row_cache: As for ``BatchedLM``.
        **options: Options of ``BatchedLM``: ``batch_size``, ``timeout``, ``row_cache_bytes``, …
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **BatchedLM.option_checks,
        "eos_token_ids": optional(sequence(integer(), "a collection of token ids")),
    }

    @shows_options(LMOptions)
    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        max_batch_size: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        row_cache: RowCache[Row] | None = None,
        **options: Unpack[LMOptions],
    ) -> None:
        own, given = self._parted(locals())
        size: int | None = given.pop("vocab_size")
        if size is None:
            size = len(decode_vocab(tokenizer, self_check=False).byte_vocab)
        super().__init__(tokenizer, MockEvaluator(size, **given), **own)

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> Self:
        """Mock a named model: load its tokenizer and end-of-text ids, but no weights.

        Args:
            model_name: A repository on the hub, a local directory, or ``"smollm2"``.
            **kwargs: Options of the constructor.
        """
        from genlm_backend.backends.loading import load_tokenizer, named_ends

        cls.check_options(kwargs)
        tokenizer = load_tokenizer(model_name)
        given: dict[str, Any] = {"eos_token_ids": named_ends(model_name), **kwargs}
        return cls(tokenizer, **given)


@final
class MockEvaluator(StatelessEvaluator):
    """Computes the pseudo-random rows of ``MockAsyncLM``."""

    def __init__(
        self,
        vocab_size: int,
        max_length: int | None = None,
        max_batch_size: int | None = None,
        eos_token_ids: Collection[int] | None = None,
    ) -> None:
        super().__init__(vocab_size)
        self._size = vocab_size
        self.info = dataclasses.replace(
            self.info,
            max_length=max_length,
            max_batch_size=max_batch_size,
            eos_token_ids=eos_token_ids,
        )

    def evaluate(self, queries: Sequence[RowQuery], /) -> Sequence[Row]:
        logits = torch.stack([self._logits(query) for query in queries])
        return rows_of_logits(logits, in_place=True)

    def _logits(self, query: RowQuery) -> torch.Tensor:
        digest = hashlib.sha384(array("q", query.token_ids).tobytes()).digest()
        words = np.frombuffer(digest, dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=words[:2], counter=words[2:]))
        return torch.from_numpy(random.standard_normal(self._size, dtype=np.float32))
