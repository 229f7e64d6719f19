"""KVCachingLM: the interface of a model over an evaluator that keeps keys and values."""

from __future__ import annotations

import abc

from genlm_backend.errors import CacheError
from genlm_backend.model.batched_lm import BatchedLM
from genlm_backend.model.query import Query, TokenIds


class KVCachingLM(BatchedLM):
    """A model over an evaluator that keeps the keys and values of every prefix seen.

    Its arguments, and the errors that making one may raise, are those of ``BatchedLM``.
    """

    @property
    def kv_reuse(self) -> bool:
        """Whether keys and values are reused; where not, every context is run whole."""
        return self._info.num_slots is not None

    def cache_kv(self, prompt_tokens: TokenIds, lora_name: str | None = None) -> None:
        """Compute a prompt now and keep its keys and values until a cache is cleared.

        Caching is automatic, so nobody has to call this: it only keeps the prompt from being
        evicted. Blocks the thread. Does nothing for models that run every context whole. Where
        there are several replicas of a model, each of them keeps the prompt.

        Raises:
            CacheError: If the prompt does not fit into ``kv_cache_bytes``, or its running state, of
                a model that has such, beside those that are pinned.
        """
        query = self._query(prompt_tokens, lora_name)
        self._before_wait()

        def pin() -> bool:
            self._adapters.check(query)
            return self._evaluator.pin(query)

        if not self._call(pin) and self.kv_reuse:
            raise CacheError(
                f"a prompt of {len(query.context)} tokens does not fit into the "
                f"{self.kv_capacity} tokens of kv_cache_bytes that are not pinned"
                f"{self._of_states()}"
            )
        self._is_kept(query)

    def _of_states(self) -> str:
        """Return the part of an error about room that is for models with running states."""
        budget = self._evaluator.counts().state_bytes_budget
        return f", or its running state into state_cache_bytes={budget}" if budget else ""

    def clear_kv_cache(self) -> None:
        """Forget every cached key and value, pinned ones too. No answer changes by it.

        Comes after the batch that is being evaluated, for which the calling thread waits.
        """
        self._clear_kept()

    @abc.abstractmethod
    def _is_kept(self, query: Query) -> None:
        """Note that a context's keys and values are there now, on whatever thread."""
