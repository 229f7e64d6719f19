"""AsyncVirtualLM: a model evaluated by vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from genlm_backend.checks import (
    Check,
    checked,
    integer,
    listed,
    mapping,
    optional,
)
from genlm_backend.errors import AdapterError, BatcherClosedError, UnknownAdapterError
from genlm_backend.llm.adapters import AdapterNames
from genlm_backend.llm.base import ADAPTER_CHECKS, TokenIds, check_adapter_name, progress_bar
from genlm_backend.llm.batched import DEFAULT_ROW_CACHE_BYTES, BatchedLM
from genlm_backend.llm.loading import check_reachable, explained, resolve_name
from genlm_backend.llm.query import Query
from genlm_backend.llm.rows import separate_rows
from genlm_backend.llm.sampling import check_sampling
from genlm_backend.llm.statistics import BackendCounts
from genlm_backend.llm.vllm.completion import Completion
from genlm_backend.llm.vllm.release import check_release
from genlm_backend.llm.vllm.rounds import Rounds
from genlm_backend.llm.vllm.row_cache import cache_opts as check_cache_opts
from genlm_backend.llm.vllm.row_cache import row_cache
from genlm_backend.llm.vllm.session_engine import SessionEngine


class AsyncVirtualLM(BatchedLM):
    """A model of vLLM whose next-token log-probabilities can be awaited.

    Each context lives in vLLM as a session: a token more extends it, a fork of it copies one
    block. Sessions are bounded by vLLM's own limits and given up oldest first. Everything that
    waits runs on one thread, so that no event loop waits for a forward pass.

    Args:
        engine: What ``from_name`` makes.
        cache_size: Rows to keep, at most; 0 bounds them by bytes only.
        cache_opts: ``max_bytes`` of the rows kept, in place of ``row_cache_bytes``, and
            ``move_to_cpu``: whether to keep them in main memory, wherever they are returned.
        batch_size: Distinct contexts evaluated at once, at most.
        timeout: Seconds that the first query of a batch may wait for company.
        row_cache_bytes: Bytes of rows to keep; 0 keeps none.
        output_device: Where rows are returned: "cpu", "cuda:0", …
        max_length: The longest context to take, where it is less than vLLM's
            ``max_model_len - 1`` (one place is for a token that vLLM samples).
        self_check: Compare a few probe texts with the bytes of their tokens.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type, or ``cache_opts`` has
            another name.
        OptionError: (``ValueError``) If one is out of its bounds.
        DeviceError: (``ValueError``) If ``output_device`` is not there.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **BatchedLM.option_checks,
        "cache_size": integer(0),
        "cache_opts": optional(check_cache_opts),
    }

    def __init__(
        self,
        engine: SessionEngine,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 20,
        timeout: float = 0.02,
        row_cache_bytes: int = DEFAULT_ROW_CACHE_BYTES,
        output_device: str | torch.device = "cpu",
        max_length: int | None = None,
        self_check: bool = True,
    ) -> None:
        options = {
            "cache_size": cache_size,
            "cache_opts": cache_opts,
            "row_cache_bytes": row_cache_bytes,
            "max_length": max_length,
        }
        given = checked(self.option_checks, options)
        super().__init__(
            engine.tokenizer,
            vocab_size=engine.vocab_size,
            max_length=min(
                given["max_length"] or engine.max_length,
                engine.max_length,
                engine.num_blocks * engine.block_size,
            ),
            batch_size=batch_size,
            max_batch_size=engine.max_sessions,
            timeout=timeout,
            row_cache=row_cache(
                given["cache_size"], given["row_cache_bytes"], **(given["cache_opts"] or {})
            ),
            output_device=output_device,
            self_check=self_check,
        )
        self._engine = engine
        self._rounds = Rounds(engine, self.check_wanted)
        self._undefined = torch.tensor(sorted(self.undefined_ids), dtype=torch.int64)
        self._adapters = AdapterNames()
        self._is_pumping = False

    @classmethod
    def from_name(
        cls, model_name: str, engine_opts: dict[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """Load a model with vLLM.

        The first engine of a process runs in it. A second one runs in a process of its own, and
        so does one with several workers, or where ``VLLM_ENABLE_V1_MULTIPROCESSING=1`` is set.
        A script that loads such a one guards its main part with ``if __name__ == "__main__":``.

        Args:
            model_name: A repository on the hub, a local directory, or ``"smollm2"``.
            engine_opts: For ``vllm.LLM``, such as ``dtype``, ``max_model_len``,
                ``tensor_parallel_size``, ``enable_lora``, ``gpu_memory_utilization`` (0.9),
                ``max_num_seqs``.
            **kwargs: For the constructor.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type; as with
                the next, nothing is loaded then.
            OptionError: (``ValueError``) If one is out of its bounds.
            MissingExtraError: (``ImportError``) If vLLM is absent, or a release not supported.
            UnsupportedModelError: (``ValueError``) If an option or the model does not go with
                sessions.
            ModelNotFoundError: (``OSError``) If there is no such model.
        """
        check_release()
        cls.check_options(kwargs)
        optional(mapping)("engine_opts", engine_opts)
        from genlm_backend.llm.vllm.engine import Engine

        path = resolve_name(model_name)
        with explained(model_name):
            check_reachable(path)
            engine = Engine.load(path, dict(engine_opts or {}))
        try:
            return cls(engine, **kwargs)
        except BaseException:
            engine.close()
            raise

    # ---------------------------------------------------------------- rows

    def evaluate(self, queries: list[Query]) -> Sequence[torch.Tensor | Exception]:
        """Return one row for each query, on the output device."""
        answers: dict[Query, torch.Tensor | Exception] = {}
        for query in queries:
            try:
                self._adapters.check_current(query)
            except UnknownAdapterError as error:  # removed since it was asked
                answers[query] = error
        known = [query for query in queries if query not in answers]
        if known:
            answers.update(zip(known, self._finish(self._rounds.evaluate(known)), strict=True))
        return [answers[query] for query in queries]

    def _finish(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(self._undefined):
            stacked = torch.stack(rows).to(self.output_device)
            undefined = self._undefined.to(self.output_device)
            logits = (stacked[:, :-1] + stacked[:, -1:]).index_fill(1, undefined, -torch.inf)
            return separate_rows(logits)
        if rows[0].device != self.output_device:
            rows = list(torch.stack(rows).to(self.output_device))
        # A view would keep the rows of its whole batch alive.
        return [
            row if row.untyped_storage().nbytes() == row.nbytes else row.clone() for row in rows
        ]

    @property
    def kv_capacity(self) -> int | None:
        """Tokens that vLLM's blocks hold, but for the unused ends of a batch's last blocks."""
        assert self.max_length is not None
        num_blocks = self._engine.num_blocks - self.batch_size
        return max(self.max_length, num_blocks * self._engine.block_size)

    async def num_cached_tokens(self, token_ids: TokenIds, lora_name: str | None = None) -> int:
        """Return how many of a context's tokens a session has."""
        query = self._query(token_ids, lora_name)
        found = self._batcher.call_soon(lambda: self._rounds.table.num_shared(query))
        return await asyncio.wrap_future(found)

    # ---------------------------------------------------------------- samples

    async def sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Sample a continuation with vLLM's own sampler; see ``AsyncLM.sample``.

        No row leaves vLLM for it. A seed gives other draws than on other backends.
        """
        samples = await self.batch_sample(
            [prompt_token_ids], max_tokens, eos_token_ids, temperature, seed, lora_name
        )
        return samples[0]

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
        progress: bool = False,
    ) -> list[list[int]]:
        """Sample a continuation of each prompt with vLLM's own sampler."""
        given = check_sampling(
            max_tokens=max_tokens,
            eos_token_ids=eos_token_ids,
            temperature=temperature,
            seed=seed,
        )
        check_sampling(progress=progress)
        contexts = listed("prompt_token_ids_list", prompt_token_ids_list)
        prompts = [self._query(token_ids, lora_name) for token_ids in contexts]
        if max_tokens == 0:
            return [[] for _ in prompts]
        assert self.max_length is not None
        completions = [
            Completion(prompt, **given, stream=stream, max_length=self.max_length)
            for stream, prompt in enumerate(prompts)
        ]
        with progress_bar(len(completions), progress) as bar:
            self._batcher.call_soon(lambda: self._start(completions))
            futures = [asyncio.wrap_future(completion.future) for completion in completions]
            for future in futures:
                future.add_done_callback(lambda _: bar.update())
            try:
                return await asyncio.gather(*futures)
            finally:
                for completion in completions:
                    completion.future.cancel()

    def _start(self, completions: list[Completion]) -> None:
        try:
            for completion in completions:
                self._adapters.check_current(completion.prompt)
        except UnknownAdapterError as error:  # removed since they were asked
            for completion in completions:  # all of one adapter
                completion.fail(error)
            return
        self._rounds.start(completions, self.undefined_ids)
        if not self._is_pumping:
            self._pump()

    def _pump(self) -> None:
        """Make one step for the completions and, if any are left, put the next into the queue.

        Batches that wait go in between, and take the completions along.
        """
        self._is_pumping = self._rounds.go_on()
        if self._is_pumping:
            with contextlib.suppress(BatcherClosedError):  # close() settles what is left
                self._batcher.call_soon(self._pump)

    # ---------------------------------------------------------------- adapters

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter, to be named in queries; blocks until it is there.

        Needs an engine with ``engine_opts={"enable_lora": True}``; ``max_loras`` of them can be
        in one batch, ``max_lora_rank`` bounds their rank.

        Args:
            lora_path: A directory in PEFT's format, or a repository on the hub.
            lora_name: A name that no other adapter of the model has.

        Raises:
            AdapterError: (``ValueError``) If the name is taken, or vLLM does not load it.
        """

        given = {"lora_path": lora_path, "lora_name": lora_name}
        checked(ADAPTER_CHECKS, given, AdapterError)

        def add() -> None:
            self._adapters.check_free(lora_name)
            self._engine.add_adapter(lora_name, str(lora_path))
            self._adapters.add(lora_name)

        self._batcher.call(add)

    def remove_lora(self, lora_name: str) -> None:
        """Remove an adapter, and clear the cache.

        Queries and samples with it that have not ended get an ``UnknownAdapterError``, and no
        others.

        Raises:
            UnknownAdapterError: (``ValueError``) If there is none of that name.
        """

        check_adapter_name(lora_name)

        def remove() -> None:
            self._adapters.remove(lora_name)
            sampled = [
                c for c in self._engine.completions.values() if c.prompt.lora_name == lora_name
            ]
            self._engine.stop(sampled)
            for completion in sampled:
                completion.fail(
                    UnknownAdapterError(f"the LoRA adapter {lora_name!r} has been removed")
                )
            self._clear_engine()
            self._engine.remove_adapter(lora_name)
            self._rows.clear()

        self._batcher.call(remove)

    def check_adapter(self, lora_name: str | None) -> None:
        """Raise an ``UnknownAdapterError`` unless ``lora_name`` is loaded or ``None``."""
        self.adapter_id(lora_name)

    def adapter_id(self, lora_name: str | None) -> int | None:
        """Return the number of an adapter's load, or ``None`` for the base model."""
        return self._adapters.number(lora_name)

    # ---------------------------------------------------------------- keeping house

    def clear_cache(self) -> None:
        """Forget every row, session, key and value. No answer changes by it."""
        super().clear_cache()
        if not self._batcher.is_closed:
            self._batcher.call(self._clear_engine)

    def _clear_engine(self) -> None:
        self._rounds.forget_sessions()
        self._engine.reset()

    def backend_counts(self) -> BackendCounts:
        """Return the part of the statistics that only the backend knows."""
        return BackendCounts(
            num_forwards=self._engine.num_steps,
            tokens_computed=self._rounds.tokens_computed,
            tokens_reused=self._rounds.tokens_reused,
            num_evicted_tokens=self._rounds.tokens_evicted,
        )

    def cleanup(self) -> None:
        """Do as ``close()``; its older name."""
        self.close()

    def release(self) -> None:
        """End the engine and free what it holds."""
        completions = list(self._engine.completions.values())
        self._engine.close()
        for completion in completions:
            completion.fail(BatcherClosedError("closed before the sample was complete"))
