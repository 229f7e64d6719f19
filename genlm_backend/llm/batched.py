"""BatchedLM: every method of AsyncLM once, over one abstract ``evaluate``."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from genlm_backend.batching import Batcher, BatchPolicy
from genlm_backend.cache import RowCache
from genlm_backend.checks import (
    Check,
    byte_count,
    checked,
    instance,
    integer,
    listed,
    number,
    optional,
)
from genlm_backend.checks import device as check_device
from genlm_backend.llm.base import AsyncLM, TokenIds, check_adapter_name
from genlm_backend.llm.query import Query, check_context
from genlm_backend.llm.statistics import BackendCounts, LMStatistics

DEFAULT_ROW_CACHE_BYTES = 256 << 20


class BatchedLM(AsyncLM):
    """An ``AsyncLM`` whose backend writes ``evaluate(queries) -> rows`` and nothing else.

    Args:
        tokenizer: Anything that ``decode_vocab`` takes.
        vocab_size: Width of the model's rows, where it may differ from the tokenizer's.
        max_length: The longest context the model takes, or ``None``.
        batch_size: Distinct contexts evaluated at once, at most.
        max_batch_size: As many as the backend can evaluate at once, where that is bounded; a
            larger ``batch_size`` means this.
        timeout: Seconds that the first query of a batch may wait for company. It is an upper
            bound that hardly anybody meets: a batch goes as soon as the event loop has nothing
            more to add to it.
        row_cache_bytes: Bytes of rows to keep, so that a context asked again costs no forward
            pass; 0 keeps none.
        row_cache: In place of one that ``row_cache_bytes`` bounds.
        output_device: Where rows are returned: "cpu", "cuda:0", …
        self_check: Compare a few probe texts with the bytes of their tokens.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds.
        DeviceError: (``ValueError``) If ``output_device`` is not there.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **AsyncLM.option_checks,
        "max_length": optional(integer(1)),
        "batch_size": integer(1),
        "max_batch_size": optional(integer(1)),
        "timeout": number(0, is_finite=False),
        "row_cache_bytes": byte_count,
        "row_cache": optional(instance(RowCache, "a RowCache")),
        "output_device": check_device,
    }

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        batch_size: int = 20,
        max_batch_size: int | None = None,
        timeout: float = 0.02,
        row_cache_bytes: int = DEFAULT_ROW_CACHE_BYTES,
        row_cache: RowCache | None = None,
        output_device: str | torch.device = "cpu",
        self_check: bool = True,
    ) -> None:
        options = {
            "max_length": max_length,
            "batch_size": batch_size,
            "max_batch_size": max_batch_size,
            "timeout": timeout,
            "row_cache_bytes": row_cache_bytes,
            "row_cache": row_cache,
            "output_device": output_device,
        }
        given = checked(self.option_checks, options)
        super().__init__(tokenizer, vocab_size=vocab_size, self_check=self_check)
        self._max_batch_size: int | None = given["max_batch_size"]
        self.output_device: torch.device = given["output_device"]
        self.max_length = given["max_length"]
        policy = BatchPolicy(max_batch_size=self._bounded(batch_size), timeout=timeout)
        self._rows = RowCache(given["row_cache_bytes"]) if row_cache is None else row_cache
        self._batcher: Batcher[Query, torch.Tensor] = Batcher(self._evaluate_and_store, policy)

    # ---------------------------------------------------------------- for backends

    @abc.abstractmethod
    def evaluate(self, queries: list[Query]) -> Sequence[torch.Tensor | Exception]:
        """Return one row for each of 1 to ``batch_size`` distinct queries, in order.

        Called on the worker thread, never twice at once. Each row is float32 ``[vocab]``, or
        ``[vocab + 1]`` with the logarithm of what the model's logits were normalised by at its
        end; it owns its memory and is not modified afterwards. An exception in place of a row is
        raised for that query's callers and disturbs no other. Where it takes long, it calls
        ``check_wanted()`` between its steps.
        """

    def adapter_id(self, lora_name: str | None) -> int | None:
        """Return the number of an adapter's load, or ``None`` for the base model; any thread.

        A backend whose adapters can be removed gives each load another number, so that what was
        asked of one adapter is never answered by another of its name.

        Raises:
            UnknownAdapterError: (``ValueError``) If ``lora_name`` is not loaded.
        """
        self.check_adapter(lora_name)
        return None

    def check_wanted(self) -> None:
        """Raise, on the worker thread, if nobody waits any more for what it evaluates.

        The error is let through: ``evaluate`` ends, and the thread is free for others.

        Raises:
            QueryDroppedError: If all callers have gone, at ``close()``, and at interpreter exit.
        """
        self._batcher.check_wanted()

    def backend_counts(self) -> BackendCounts:
        """Return the part of the statistics that only the backend knows."""
        return BackendCounts()

    def before_wait(self) -> None:
        """Prepare the calling thread for waiting; called before a query is queued."""

    def release(self) -> None:
        """Free what the backend holds; called once, after the last batch."""

    # ---------------------------------------------------------------- rows

    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities of the token after ``token_ids``: float32 ``[vocab]``."""
        return self._own(await self._answer(self._query(token_ids, lora_name)))

    async def next_token_logits(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return what the model said before it was normalised: float32 ``[vocab]``."""
        row = await self._answer(self._query(token_ids, lora_name))
        logits = self._own(row)
        return logits.add_(row[-1].to(logits.device)) if len(row) > len(logits) else logits

    async def _answer(self, query: Query) -> torch.Tensor:
        row = self._rows.get(query)
        if row is None:
            self.before_wait()
            row = await self._batcher.submit(query)
        return row

    def _own(self, row: torch.Tensor) -> torch.Tensor:
        """Return a copy of the log-probabilities that is the caller's to modify."""
        return copy_row(row[: len(self.byte_vocab)], self.output_device)

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the same row as ``next_token_logprobs``, blocking the calling thread."""
        return self._own(self._rows_sync([self._query(token_ids, lora_name)])[0])

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[TokenIds], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the rows of many contexts, in order: float32 ``[len(token_ids_list), vocab]``."""
        contexts = listed("token_ids_list", token_ids_list)
        queries = [self._query(token_ids, lora_name) for token_ids in contexts]
        rows = {query: self._rows.get(query) for query in queries}
        missing = [query for query, row in rows.items() if row is None]
        self.before_wait()
        rows.update(
            zip(missing, await asyncio.gather(*map(self._batcher.submit, missing)), strict=True)
        )
        return self._stack([rows[query] for query in queries])

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[TokenIds], lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the same rows as ``batch_next_token_logprobs``, blocking the calling thread."""
        contexts = listed("token_ids_list", token_ids_list)
        return self._stack(
            self._rows_sync([self._query(token_ids, lora_name) for token_ids in contexts])
        )

    def _query(self, token_ids: TokenIds, lora_name: str | None) -> Query:
        self._batcher.check_open()
        if lora_name is not None:
            check_adapter_name(lora_name)
        adapter_id = self.adapter_id(lora_name)
        context = check_context(token_ids, len(self.byte_vocab), self.max_length)
        return Query(context, lora_name, adapter_id)

    def _rows_sync(self, queries: list[Query]) -> list[torch.Tensor]:
        rows = {query: self._rows.get(query) for query in queries}
        missing = [query for query, row in rows.items() if row is None]
        if missing:
            self.before_wait()
            rows.update(zip(missing, self._batcher.submit_sync(missing), strict=True))
        return [row for query in queries if (row := rows[query]) is not None]

    def _stack(self, rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
        size = len(self.byte_vocab)
        present = [row[:size].to(self.output_device) for row in rows if row is not None]
        return torch.stack(present) if present else torch.empty(0, size, device=self.output_device)

    def _evaluate_and_store(self, queries: list[Query]) -> Sequence[torch.Tensor | Exception]:
        generation = self._rows.generation
        rows = self.evaluate(queries)
        for query, row in zip(queries, rows, strict=True):
            if not isinstance(row, Exception):
                self._rows.put(query, row, generation)
        return rows

    # ---------------------------------------------------------------- the queue

    @property
    def batch_size(self) -> int:
        """Distinct contexts evaluated at once, at most; can be set, for the batches to come."""
        return self._batcher.policy.max_batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self._batcher.set_policy(max_batch_size=self._bounded(batch_size))

    @property
    def timeout(self) -> float:
        """Seconds that the first query of a batch may wait for company; can be set."""
        return self._batcher.policy.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self._batcher.set_policy(timeout=timeout)

    def _bounded(self, batch_size: int) -> int:
        wanted = integer(1)("batch_size", batch_size)
        return min(wanted, self._max_batch_size or wanted)

    def batch_evaluate_queries(self) -> None:
        """Let what is waiting go now, or as soon as the batch under way is done."""
        self._batcher.flush()

    def reset_async_queries(self) -> None:
        """Settle every waiting caller with a ``QueryDroppedError`` (a ``RuntimeError``)."""
        self._batcher.drop("the query was dropped by reset_async_queries()")

    # ---------------------------------------------------------------- keeping house

    def clear_cache(self) -> None:
        """Forget every cached row, key and value. No answer changes by it."""
        self._rows.clear()

    def statistics(self) -> LMStatistics:
        """Return what batching and caching have done so far."""
        batching, backend = self._batcher.statistics(), self.backend_counts()
        return LMStatistics(
            num_awaits=batching.num_submitted + self._rows.num_hits,
            num_batches=batching.num_batches,
            num_forwards=backend.num_forwards,
            batch_sizes=batching.batch_sizes,
            tokens_computed=backend.tokens_computed,
            tokens_reused=backend.tokens_reused,
            row_cache_hits=self._rows.num_hits,
            num_joined=batching.num_joined,
            num_skipped=batching.num_skipped,
            row_bytes_used=self._rows.num_bytes,
            row_bytes_budget=self._rows.budget,
            kv_bytes_used=backend.kv_bytes_used,
            kv_bytes_budget=backend.kv_bytes_budget,
            num_evicted_rows=self._rows.num_evicted,
            num_evicted_tokens=backend.num_evicted_tokens,
        )

    def close(self) -> None:
        """Settle every waiter with an error and free what the model holds.

        A forward pass under way is waited for. In a fork of the model's process, nothing is done.
        """
        if not (self._batcher.is_foreign or self._batcher.is_closed):
            self._batcher.close()
            self._rows.clear()
            self.release()


def copy_row(row: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on ``device`` that is the caller's to modify."""
    if row.device.type != "cpu" or device.type != "cpu":
        return row.to(device, copy=True)
    # One memcpy. torch would wake a team of threads for it, which is slower than the copy.
    return torch.from_numpy(row.numpy().copy())
