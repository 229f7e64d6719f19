"""AsyncVirtualLM: a model evaluated by vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch

from genlm_backend.errors import EvaluationError, MissingExtraError
from genlm_backend.llm.batched import DEFAULT_ROW_CACHE_BYTES, BatchedLM
from genlm_backend.llm.loading import resolve_name
from genlm_backend.llm.query import Query
from genlm_backend.llm.statistics import BackendCounts
from genlm_backend.llm.vllm.sessions import SessionTable, Step


class SessionEngine(Protocol):
    """What is needed of an engine; ``engine.Engine`` is it over vLLM."""

    tokenizer: Any
    vocab_size: int
    max_length: int
    max_sessions: int
    block_size: int
    num_blocks: int
    num_steps: int

    def num_free_blocks(self) -> int:
        """Return how many blocks of keys and values nobody holds."""
        ...

    def add(self, step: Step) -> None:
        """Start or extend a session."""
        ...

    def run(self, session_ids: list[str]) -> list[torch.Tensor]:
        """Compute the rows of these sessions."""
        ...

    def release(self, session_ids: list[str]) -> None:
        """Give sessions up."""
        ...

    def reset(self) -> None:
        """Forget the blocks of sessions that were given up."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


class AsyncVirtualLM(BatchedLM):
    """A model of vLLM whose next-token log-probabilities can be awaited.

    Each context lives in vLLM as a session: a token more extends it, a fork of it copies one
    block. Sessions are bounded by vLLM's own limits and given up oldest first.

    Args:
        engine: What ``from_name`` makes.
        batch_size: Distinct contexts evaluated at once, at most.
        timeout: Seconds that the first query of a batch may wait for company.
        row_cache_bytes: Bytes of rows to keep; 0 keeps none.
        max_length: The longest context to take, where it is less than vLLM's
            ``max_model_len - 1`` (one place is for a token that vLLM samples).
        self_check: Compare a few probe texts with the bytes of their tokens.
    """

    def __init__(
        self,
        engine: SessionEngine,
        batch_size: int = 20,
        timeout: float = 0.02,
        *,
        row_cache_bytes: int = DEFAULT_ROW_CACHE_BYTES,
        max_length: int | None = None,
        self_check: bool = True,
    ) -> None:
        super().__init__(
            engine.tokenizer,
            vocab_size=engine.vocab_size,
            max_length=min(max_length or engine.max_length, engine.max_length),
            batch_size=min(batch_size, engine.max_sessions),
            timeout=timeout,
            row_cache_bytes=row_cache_bytes,
            self_check=self_check,
        )
        self._engine = engine
        # Rows are told apart by session, and several models may live in one process.
        self._table = SessionTable(engine.max_sessions, prefix=uuid.uuid4().hex)
        self._undefined = torch.tensor(sorted(self.undefined_ids), dtype=torch.int64)
        self._tokens_computed = self._tokens_reused = self._tokens_evicted = 0

    @classmethod
    def from_name(
        cls, model_name: str, engine_opts: dict[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """Load a model with vLLM, in this process.

        Args:
            model_name: A repository on the hub, a local directory, or ``"smollm2"``.
            engine_opts: For ``vllm.LLM``, such as ``dtype``, ``max_model_len``,
                ``gpu_memory_utilization`` (0.9), ``max_num_seqs``.
            **kwargs: For the constructor.

        Raises:
            MissingExtraError: (``ImportError``) If vLLM is absent, or a release not supported.
            ModelNotFoundError: (``OSError``) If there is no such model.
        """
        try:
            from genlm_backend.llm.vllm.engine import Engine
        except ImportError as error:
            raise MissingExtraError(
                f"AsyncVirtualLM needs vLLM ({error}); see the guide to models for how to "
                f"install it. AsyncTransformer (backend 'hf') runs the same programs."
            ) from error
        engine = Engine.load(str(resolve_name(model_name)), dict(engine_opts or {}))
        return cls(engine, **kwargs)

    def evaluate(self, queries: list[Query]) -> Sequence[torch.Tensor]:
        """Return one row for each query, in as few rounds as the engine has room for."""
        rows: list[torch.Tensor] = []
        try:
            while len(rows) < len(queries):
                steps = self._plan_round(queries[len(rows) :])
                for step in steps:
                    self._engine.add(step)
                rows.extend(self._engine.run([step.session for step in steps]))
                self._table.commit()
                reused = sum(step.num_shared for step in steps)
                self._tokens_reused += reused
                self._tokens_computed += sum(len(s.query.token_ids) for s in steps) - reused
        except BaseException:
            # Whatever state the engine's requests are in: none of them is trusted again.
            self._forget_sessions()
            raise
        return [self._finish(row) for row in rows]

    def _plan_round(self, queries: list[Query]) -> list[Step]:
        """Choose steps for as many of the queries, in order, as there is room for."""
        steps: list[Step] = []
        reserved = 0
        for query in queries:
            step = self._table.step(query)
            needed = self._blocks_of(step)
            if not self._make_room(reserved + needed):
                self._table.withdraw(step)
                if steps:
                    break
                self._forget_sessions()  # what the step itself holds is in its way
                step = self._table.step(query)
                if not self._make_room(needed := self._blocks_of(step)):
                    self._table.withdraw(step)
                    raise EvaluationError(
                        f"a context of {len(query.token_ids)} tokens does not fit into vLLM's "
                        f"{self._engine.num_blocks} blocks of {self._engine.block_size} tokens"
                    )
            reserved += needed
            steps.append(step)
        return steps

    def _blocks_of(self, step: Step) -> int:
        """Return how many more blocks a step may take, at most: one for a sampled token too."""
        size = self._engine.block_size
        return len(step.query.token_ids) // size + 1 - step.num_shared // size

    def _make_room(self, num_blocks: int) -> bool:
        """Give up the oldest sessions until the round fits; return whether it does."""
        while len(self._table) > self._table.max_sessions or (
            self._engine.num_free_blocks() < num_blocks
        ):
            session = self._table.oldest()
            if session is None:
                return False
            self._engine.release([session])
            self._tokens_evicted += self._table.forget(session)
        return True

    def _forget_sessions(self) -> None:
        self._engine.release(self._table.clear())

    def clear_cache(self) -> None:
        """Forget every row, session, key and value. No answer changes by it."""
        super().clear_cache()
        if not self._batcher.is_closed:
            self._batcher.call(self._clear_engine)

    def _clear_engine(self) -> None:
        self._forget_sessions()
        self._engine.reset()

    def _finish(self, row: torch.Tensor) -> torch.Tensor:
        row = row.cpu()
        if len(self._undefined):
            row = row.index_fill(0, self._undefined, -torch.inf).log_softmax(-1)
        return row

    def backend_counts(self) -> BackendCounts:
        """Return the part of the statistics that only the backend knows."""
        return BackendCounts(
            num_forwards=self._engine.num_steps,
            tokens_computed=self._tokens_computed,
            tokens_reused=self._tokens_reused,
            num_evicted_tokens=self._tokens_evicted,
        )

    def release(self) -> None:
        """End the engine and free what it holds."""
        self._engine.close()
