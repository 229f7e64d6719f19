"""BatchedLM: an AsyncLM that batches queries, runs the batches on an evaluator, caches rows."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypedDict, TypeVar, Unpack, cast

import torch

from genlm_backend.batching import Batcher, BatchPolicy
from genlm_backend.checks import (
    Check,
    Option,
    absolute_path,
    byte_count,
    check_option_names,
    checked,
    checks_of,
    defaults_of,
    instance,
    integer,
    number,
    optional,
    options_of,
    shows_options,
    switch,
)
from genlm_backend.checks import device as check_device
from genlm_backend.errors import (
    AdapterError,
    BatcherClosedError,
    CacheError,
    ModelStateError,
    OptionError,
    PictureError,
    UnknownAdapterError,
)
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.lm_statistics import LMStatistics
from genlm_backend.model.result_collector import ADAPTER_CHECKS, AdapterNames, ResultCollector
from genlm_backend.prefix.budgets import TierName, check_tier
from genlm_backend.queries.context import Context
from genlm_backend.queries.evaluator import (
    Evaluator,
    EvaluatorCounts,
    EvaluatorInfo,
    RestartableEvaluator,
)
from genlm_backend.queries.query import Adapter, Query, RowQuery, TokenIds
from genlm_backend.queries.row import Row, RowCache, table_of
from genlm_backend.readouts.particle_step import ParticleStep, StepResult, drawn_from_rows
from genlm_backend.readouts.score_query import ScoreQuery, scores_of_rows
from genlm_backend.readouts.token_readouts import ReadoutOf, readout_of, readouts_of
from genlm_backend.runtime.blocking import blocking, is_blocking
from genlm_backend.runtime.forks import OfOneProcess

T = TypeVar("T")


class RowOptions(TypedDict, total=False):
    """Options for rows, keyword arguments of ``BatchedLM``, which explains them."""

    row_cache_bytes: Annotated[int, Option(256 << 20, byte_count)]
    output_device: Annotated[str | torch.device, Option("cpu", check_device)]
    self_check: Annotated[bool, Option(True, switch)]


class LMOptions(RowOptions, total=False):
    """Options for rows and batching, keyword arguments of ``BatchedLM``, which explains them."""

    batch_size: Annotated[int, Option(20, integer(1))]
    timeout: Annotated[float, Option(0.02, number(0, is_finite=False))]


class PictureReading(Protocol):
    """Turns prompts with pictures into contexts, by the processor of one model."""

    processor: Any
    """The transformers processor; ``None`` if there is none."""

    def context(self, prompt: Any, images: Any, max_length: int | None = None) -> Context: ...


class BatchedLM(OfOneProcess, AsyncLM):
    """A model that runs on an evaluator, with checks, batching, a row cache and named adapters.

    The model's worker thread calls all methods of the evaluator except ``counts`` and ``close``.

    Args:
        tokenizer: Anything that ``decode_vocab`` takes.
        evaluator: The evaluator, which no other model may share.
        batch_size: Distinct contexts in a batch, at most; if the evaluator's ``max_batch_size`` is
            less, it applies instead. A text to score counts as ``length / 200`` contexts, or as one
            if the evaluator has a ``max_batch_size``.
        timeout: Seconds that the first query of a batch may wait for others. The bound rarely
            matters: a batch is sent as soon as the event loop has no further query to add.
        row_cache_bytes: Bytes of rows to keep, at most, so that a repeated context costs no
            forward pass; 0 keeps none.
        row_cache: A row cache to use instead of one bounded by ``row_cache_bytes``.
        output_device: Device of the returned rows: "cpu", "cuda:0", …
        self_check: Whether to compare a few probe texts with the bytes of their tokens.

    Raises:
        OptionTypeError: (``TypeError``) If an option has a wrong type.
        OptionError: (``ValueError``) If an option is out of its bounds, or the evaluator belongs to
            another model.
        DeviceError: (``ValueError``) If ``output_device`` does not exist.
        TokenizerDecodeError: (``ValueError``) If the bytes of some token cannot be determined.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **AsyncLM.option_checks,
        **checks_of(LMOptions),
        "max_length": optional(integer(1)),
        "max_batch_size": optional(integer(1)),
        "row_cache": optional(instance(RowCache, "a RowCache")),
    }

    _pictures: PictureReading | None = None

    @shows_options(LMOptions)
    def __init__(
        self,
        tokenizer: Any,
        evaluator: Evaluator,
        *,
        row_cache: RowCache[Row] | None = None,
        **options: Unpack[LMOptions],
    ) -> None:
        given, _ = self._parted(locals())
        self._evaluator = instance(Evaluator, "an Evaluator")("evaluator", evaluator)
        if "check_cancelled" in vars(evaluator):  # another model has set it, as below
            raise OptionError("the evaluator belongs to another model: make a new evaluator")
        self.output_device: torch.device = given["output_device"]
        self._rows = RowCache[Row](given["row_cache_bytes"]) if row_cache is None else row_cache
        self._adapters = AdapterNames()
        self._answering = ResultCollector(evaluator, self._rows, self._adapters)
        self._closing, self._is_closed = threading.RLock(), False
        self._last_counts: EvaluatorCounts | None = None  # the evaluator's, when it was closed
        self._batcher: Batcher[Query, Any] = self._asking(BatchPolicy(timeout=given["timeout"]))
        self._submit, self._submit_all = self._batcher.submit, self._batcher.submit_all
        evaluator.check_cancelled = self._batcher.check_cancelled
        try:
            info = self._call(evaluator.open) if evaluator.info is None else evaluator.info
            self._info = instance(EvaluatorInfo, "an EvaluatorInfo")("info", info)
            self._batcher.set_policy(max_batch_size=self._bounded(given["batch_size"]))
            vocab_size, self_check = self._info.vocab_size, given["self_check"]
            super().__init__(tokenizer, vocab_size=vocab_size, self_check=self_check)
        except BaseException:
            self._batcher.close()  # or its thread would live as long as the traceback
            evaluator.close()
            raise
        self.max_length, self.kv_cache_dtype = self._info.max_length, self._info.kv_cache_dtype
        self._own_eos = self._info.eos_token_ids
        self._before_wait = self._info.before_wait
        self.has_host_tier = self._info.num_host_slots is not None
        self.device = self.output_device
        self.model_device = None if self._info.device is None else torch.device(self._info.device)
        self._answering.opened(self._info, len(self.byte_vocab), self.undefined_ids)

    @classmethod
    def _parted(cls, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check a constructor's ``locals()``; return ``BatchedLM``'s options, and the others."""
        # ``__class__`` is the class that defines the constructor; ``cls`` may be a subclass of it.
        check_option_names(values["__class__"], values["options"], cls.library_opts)
        all_values = {**defaults_of(LMOptions), **values, **values["options"]}
        given = checked(
            cls.option_checks, {n: v for n, v in all_values.items() if n in cls.option_checks}
        )
        names = (*options_of(LMOptions), "row_cache")
        return {n: given.pop(n) for n in names if n in given}, given

    def __repr__(self) -> str:
        name, size = type(self).__name__, len(getattr(self, "byte_vocab", ()))
        if not size:  # the constructor has raised, or still runs
            return f"<{name}>"
        device = "" if self.model_device is None else f" on {self.model_device}"
        capacity, num_states = self.kv_capacity, self._info.num_states
        kept = f"keeps {capacity} tokens" if capacity else "keeps no tokens"
        states = f" and {num_states} recurrent states" if num_states else ""
        died = ", has died" if self._evaluator.has_died else ""
        return f"<{name} of {size} token ids{device}, {kept}{states}{died}>"

    def _asking(self, policy: BatchPolicy) -> Batcher[Query, Any]:
        asked = self._answering
        options = {"weight": asked.weight, "forward_key": asked.forward_key}
        return Batcher(asked.answers, policy, name=type(self).__name__, **options)

    # ---------------------------------------------------------------- rows, scores, draws

    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        query = self._query(token_ids, lora_name)
        row = self._rows.get(query)
        if row is None:  # inlined: one more coroutine would add 2 % to the time of a row
            self._before_wait()
            row = await self._batcher.submit(query)
        return row.copy_logprobs(self.output_device)

    async def next_token_logits(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        query = self._query(token_ids, lora_name)
        row = self._rows.get(query)
        if row is None:
            self._before_wait()
            row = await self._batcher.submit(query)
        return row.own_logits(self.output_device)

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        query = self._query(token_ids, lora_name)
        row = self._rows.get(query)
        if row is None:
            self._before_wait()
            (row,) = self._batcher.submit_sync([query])
        return row.copy_logprobs(self.output_device)

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[TokenIds], lora_name: str | None = None
    ) -> torch.Tensor:
        return await self._rows_of(self._queries(token_ids_list, lora_name))

    batch_next_token_logprobs_sync = blocking(batch_next_token_logprobs, "rows")

    async def _rows_of(self, queries: list[RowQuery]) -> torch.Tensor:
        rows = {q: row for q in queries if (row := self._rows.get(q)) is not None}
        missing = [query for query in queries if query not in rows]
        if missing:
            self._before_wait()
            rows.update(zip(missing, await self._submit_all(missing), strict=True))
        if not rows:
            return torch.empty(
                0, len(self.byte_vocab), dtype=torch.float32, device=self.output_device
            )
        return table_of([rows[query] for query in queries], self.output_device)

    _rows_of_sync = blocking(_rows_of)

    def _submit_sync(self, query: Query) -> Any:
        return self._batcher.submit_sync([query])[0]

    def _submit_all_sync(self, queries: Sequence[Query]) -> list[Any]:
        return self._batcher.submit_sync(queries)

    def _query(self, token_ids: TokenIds, lora_name: str | None) -> RowQuery:
        self._batcher.check_open()
        adapter = None if lora_name is None else self._adapter(lora_name)
        return RowQuery(self.contexts.check_context(token_ids, self.max_length), adapter)

    def _queries(self, token_ids_list: Sequence[TokenIds], lora_name: str | None) -> list[RowQuery]:
        self._batcher.check_open()
        adapter = None if lora_name is None else self._adapter(lora_name)
        contexts = self.contexts.check_contexts("token_ids_list", token_ids_list, self.max_length)
        return [RowQuery(context, adapter) for context in contexts]

    async def _scored(self, asked: list[ScoreQuery], lora_name: str | None) -> list[torch.Tensor]:
        self._batcher.check_open()
        self._before_wait()
        # An evaluator with ``scores`` but without ``reads_out`` returns no ``ScoreExtras``.
        if self._info.scores and (self._info.reads_out or not any(q.needs_row for q in asked)):
            return await self._submit_all(asked)
        return await scores_of_rows(asked, self._rows_of, self.batch_size)

    _scored_sync = blocking(_scored)

    async def read(
        self, token_ids: TokenIds, readout: ReadoutOf, lora_name: str | None = None
    ) -> Any:
        query = self._query(token_ids, lora_name)
        asked, row = readout_of(readout, query), self._rows.get(query)
        if row is not None:
            return asked.of_row(row)
        self._before_wait()
        return await self._submit(asked)

    read_sync = blocking(read, "answer")

    async def batch_read(
        self, token_ids_list: Sequence[TokenIds], readout: ReadoutOf, lora_name: str | None = None
    ) -> list[Any]:
        queries = self._queries(token_ids_list, lora_name)
        asked, answers = readouts_of(readout, queries), dict[int, Any]()
        if len(self._rows):
            rows = ((i, self._rows.get(query)) for i, query in enumerate(queries))
            answers = {i: asked[i].of_row(row) for i, row in rows if row is not None}
        if len(answers) < len(asked):
            self._before_wait()
        if not answers:  # the usual case: no row is cached
            return await self._submit_all(asked)
        missing = [i for i in range(len(asked)) if i not in answers]
        found = await self._submit_all([asked[i] for i in missing])
        answers.update(zip(missing, found, strict=True))
        return [answers[i] for i in range(len(asked))]

    batch_read_sync = blocking(batch_read, "answers")

    async def particle_results(
        self,
        steps: Sequence[ParticleStep],
        lora_name: str | None,
        with_draws: Callable[[], list[ParticleStep]] | None = None,
    ) -> list[StepResult]:
        if not self._info.takes_steps:
            return await AsyncLM.particle_results(self, steps, lora_name, with_draws)
        self._batcher.check_open()
        adapter = self._adapter(lora_name)
        self._before_wait()
        is_here = type(self._batcher) is Batcher
        is_here = is_here and not isinstance(self._evaluator, RestartableEvaluator)
        # ``with_draws`` is called during the pass, and its draws are made from the pass's rows. But
        # it is called before the pass if another process would send the rows, or this call blocks.
        if with_draws is not None and (not is_here or await is_blocking()):
            steps, with_draws = with_draws(), None
        own = [replace(step, adapter=adapter) for step in steps]
        if with_draws is None:
            return await self._submit_all(own)
        rows = asyncio.ensure_future(self._batcher.submit_all(own))
        try:
            for _ in range(
                self._batcher.policy.quiet_turns + 2
            ):  # until the batch is sent, usually
                await asyncio.sleep(0)
            given = with_draws()
            results = await rows
        finally:
            rows.cancel()
            del rows
        return await self.draws_from_rows(given, results)

    particle_results_sync = blocking(particle_results, "results")

    async def draws_from_rows(
        self, steps: Sequence[ParticleStep], rows: Sequence[StepResult]
    ) -> list[StepResult]:
        # Only the worker's thread may use the model's device.
        draws = self._batcher.call_soon(partial(drawn_from_rows, steps, rows))
        return await asyncio.wrap_future(draws)

    # ------------------------------------------------------- the worker thread and its queue

    def _call(self, method: Callable[[], T]) -> T:
        """Block until the worker has run ``method``, after all sent batches; return its result."""
        return self._batcher.call(method)

    def _call_for(self, query: RowQuery, method: Callable[[], T]) -> T:
        """Run ``method`` as ``_call`` does, or raise if the query's adapter is removed first."""

        def run() -> T:
            if error := self._adapters.error_of(query):
                raise error
            return method()

        self._before_wait()
        return self._call(run)

    async def _number_of(self, method: Callable[[Evaluator], int | None]) -> int:
        """Return the result of ``method(evaluator)``, run on the worker; 0 in place of ``None``."""
        asked = self._batcher.call_soon(partial(method, self._evaluator))
        return await asyncio.wrap_future(asked) or 0

    @property
    def batch_size(self) -> int:
        """Upper bound on the distinct contexts of a batch (see the class); can be set."""
        return self._batcher.policy.max_batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self._batcher.set_policy(max_batch_size=self._bounded(batch_size))

    @property
    def timeout(self) -> float:
        """Seconds that the first query of a batch may wait for others; can be set."""
        return self._batcher.policy.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self._batcher.set_policy(timeout=timeout)

    def _bounded(self, batch_size: int) -> int:
        wanted = integer(1)("batch_size", batch_size)
        return min(wanted, self._info.max_batch_size or wanted)

    def batch_evaluate_queries(self) -> None:
        """Send all waiting queries now, or as soon as the current batch is done."""
        self._batcher.flush()

    def reset_async_queries(self) -> None:
        """Drop all waiting queries: callers get a ``QueryDroppedError`` (a ``RuntimeError``)."""
        self._batcher.drop("the query was dropped by reset_async_queries()")

    # ---------------------------------------------------------------- keys and values

    @property
    def kv_reuse(self) -> bool:
        """Whether keys and values are reused; if not, all tokens are computed for each query."""
        return self._info.num_slots is not None

    @property
    def kv_capacity(self) -> int | None:
        return self._info.kv_capacity(self.batch_size)

    async def num_cached_tokens(
        self, token_ids: TokenIds, lora_name: str | None = None, *, tier: TierName | None = None
    ) -> int:
        """Return how many of a context's tokens are cached now and need not be computed.

        The last token is not counted: computing it gives the row. See ``AsyncLM`` for ``tier``.
        """
        query, tier = self._query(token_ids, lora_name), check_tier("tier", tier)
        return await self._number_of(lambda e: e.num_cached(query, tier))

    def cache_kv(self, prompt_tokens: TokenIds, lora_name: str | None = None) -> None:
        """Compute a prompt now and pin its keys and values until the KV cache is cleared.

        Prompts are cached without this call, but can be evicted then. Blocks the thread.
        For a model without ``kv_reuse``, this call pins nothing. If a model has several replicas,
        each of them keeps the prompt.

        Raises:
            CacheError: If the pinned prompts leave no room for this one or its recurrent state, if
                prompts of its length are not cached, or if its row is NaN.
        """
        query = self._query(prompt_tokens, lora_name)
        if not self._call_for(query, lambda: self._evaluator.pin(query)) and self.kv_reuse:
            budget = self._evaluator.counts().state_bytes_budget
            states = f", or its recurrent state does not fit into state_cache_bytes={budget}"
            raise CacheError(
                f"a prompt of {len(query.context)} tokens does not fit into the cache "
                f"({self.kv_capacity} tokens) beside the pinned prompts{states if budget else ''}"
            )
        self._is_kept(query)

    def clear_kv_cache(self) -> None:
        """Drop all cached keys, values and recurrent states, pinned ones too.

        Answers stay the same. Blocks the thread until the current batch is done.
        """
        self._clear_by(self._evaluator.clear)

    def _is_kept(self, query: RowQuery) -> None:
        """Hook for subclasses, called last by ``cache_kv`` and ``load_prefix``, on their thread."""

    def save_prefix(
        self, token_ids: TokenIds, path: str | Path, lora_name: str | None = None
    ) -> None:
        """Compute a prompt and write its keys and values to a file, for ``load_prefix``.

        The safetensors file holds the token ids, the keys, values and any recurrent state in
        their cached format, and digests of the model and the adapter. It is written atomically and
        replaces an existing file. Blocks the thread.

        Raises:
            CacheError: If the prompt does not fit into ``kv_cache_bytes``, its row is NaN, or the
                model cannot save prefixes.
            PictureError: (``ValueError``) If the prompt begins with pictures.
            OSError: If the file cannot be written. If that is known in advance, nothing is
                computed.
        """
        where = absolute_path("path", path)
        _check_writable(Path(where))
        query = self._query(token_ids, lora_name)
        if query.context.pictures is not None:
            raise PictureError("a prompt that begins with pictures cannot be saved to a file")
        self._call_for(query, lambda: self._evaluator.save_prefix(query, where))

    def load_prefix(self, path: str | Path, lora_name: str | None = None) -> Context:
        """Load keys and values into the cache from a ``save_prefix`` file; return its prompt.

        No token is computed. The loaded prefix can be evicted like any other; ``cache_kv`` pins
        it. Blocks the thread.

        Args:
            path: The file.
            lora_name: The adapter that the file was saved with.

        Raises:
            PrefixFileError: (``ValueError``) If the file is from a model with another config, other
                weights, another adapter or ``kv_cache_dtype``, or if it is truncated or changed.
            CacheError: If the prompt does not fit into ``kv_cache_bytes``, or the model cannot load
                prefixes.
            OSError: If the file cannot be read.
        """
        where = absolute_path("path", path)
        self._batcher.check_open()
        adapter = self._adapter(lora_name)
        load = partial(self._evaluator.load_prefix, where, adapter)
        context = self.contexts.check_context(
            self._call_for(RowQuery((), adapter), load), self.max_length
        )
        self._is_kept(RowQuery(context, adapter))
        return context

    # ---------------------------------------------------------------- pictures

    @property
    def processor(self) -> Any:
        """The transformers processor that reads pictures, loaded on first use.

        In a text, its ``image_token`` marks where a picture goes. ``None`` if the model takes only
        text, or was made from a loaded model without a processor.

        Raises:
            PictureError: (``ValueError``) If the model's directory or repository has none.
        """
        return None if self._pictures is None else self._pictures.processor

    @processor.setter
    def processor(self, processor: Any) -> None:
        if self._pictures is None:
            raise PictureError(
                f"{type(self).__name__} accepts no pictures: this model reads only text"
            )
        self._pictures.processor = processor

    def _asker(self) -> Callable[[Callable[[Evaluator], Any]], Any]:
        """Return ``ask``, which runs ``method(evaluator)`` on the worker and holds no ``self``."""
        before_wait, batcher, evaluator = self._before_wait, self._batcher, self._evaluator

        def ask(method: Callable[[Evaluator], Any]) -> Any:
            before_wait()
            return batcher.call(partial(method, evaluator))

        return ask

    def _pictured(
        self, prompt: TokenIds | str, images: Sequence[Any] | Mapping[str, Any]
    ) -> Context:
        if self._pictures is None:
            return super()._pictured(prompt, images)
        self._batcher.check_open()
        return self._pictures.context(prompt, images, self.max_length)

    # ---------------------------------------------------------------- adapters

    def add_new_lora(self, lora_path: str | Path, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter; if that raises, the model stays as it was.

        If another adapter had the name, the call blocks until the queries made so far are
        answered, then removes that adapter as ``remove_lora`` does.
        """
        checked(ADAPTER_CHECKS, {"lora_path": lora_path, "lora_name": lora_name}, AdapterError)
        if not self._info.takes_adapters:
            super().add_new_lora(str(lora_path), lora_name)

        def add() -> Adapter | None:
            adapter = self._adapters.new(lora_name)
            self._evaluator.add_adapter(adapter, str(lora_path))
            return self._adapters.add(adapter)

        replaced = self._call(add)
        if replaced is not None:
            self._drain(replaced)
            self._call(lambda: self._remove(replaced))

    def remove_lora(self, lora_name: str) -> None:
        """Remove an adapter, and drop all cached rows, keys and values.

        Queries for this adapter that are still waiting get an ``UnknownAdapterError``.
        """
        self._call(lambda: self._remove(self._named(lora_name)))

    def _drain(self, adapter: Adapter) -> None:
        """Block until all queries made so far, and in overrides other uses of ``adapter``, end."""
        self._batcher.drain()

    def _remove(self, adapter: Adapter) -> None:
        self._adapters.remove(adapter)
        self._evaluator.remove_adapter(adapter)
        self._rows.clear()

    def check_adapter(self, lora_name: str | None) -> None:
        self._adapter(lora_name)

    def _adapter(self, lora_name: str | None) -> Adapter | None:
        return None if lora_name is None else self._named(lora_name)

    def _named(self, lora_name: str) -> Adapter:
        checked(ADAPTER_CHECKS, {"lora_name": lora_name}, UnknownAdapterError)
        if not self._info.takes_adapters:
            super().check_adapter(lora_name)
        return self._adapters.get(lora_name)

    # ---------------------------------------------------------------- housekeeping

    def clear_cache(self) -> None:
        """Drop all cached rows, keys, values and recurrent states, pinned ones too.

        Answers stay the same. Blocks the thread until the current batch is done.
        """

        def clear() -> None:
            self._evaluator.clear()
            self._rows.clear()  # again: earlier batches may have added rows

        self._rows.clear()
        self._clear_by(clear)

    def _clear_by(self, clear: Callable[[], None]) -> None:
        with contextlib.suppress(BatcherClosedError):  # close() has freed the cache already
            self._call(clear)

    def statistics(self) -> LMStatistics:
        counts = self._evaluator.counts() if self._last_counts is None else self._last_counts
        return LMStatistics.of(self._batcher.statistics(), counts, self._rows)

    def close(self) -> None:
        """Raise a ``QueryDroppedError`` in every waiting caller, and free the model.

        Blocks until a running forward pass ends. In a fork of the model's process it does nothing.
        """
        if self._batcher.is_foreign:
            return
        with self._closing:  # a second call resumes a close that was interrupted
            self._batcher.close()
            self._rows.clear()
            if not self._is_closed:
                self._last_counts = self._last_counts or self._evaluator.counts()
                self._evaluator.close()
                self._is_closed = True


def _check_writable(path: Path) -> None:
    """Raise an ``OSError`` if it is clear in advance that the file cannot be written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(path.parent))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "no permission to create files in", str(path.parent))


class WholeLM(BatchedLM):
    """A ``BatchedLM`` whose evaluator can run a context without a cache, by ``evaluate_whole``."""

    def next_token_logprobs_uncached(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the row of a context, computed alone and without a cache: float32 ``[vocab]``.

        Use it to check the cache's answers or to time a plain forward pass. Blocks the thread.
        """
        query, evaluator = self._query(token_ids, lora_name), cast(Any, self._evaluator)
        row = self._call_for(query, lambda: evaluator.evaluate_whole(query))
        return self._answering.defined(row).copy_logprobs(self.output_device)


class ProcessLM(WholeLM):
    """A ``WholeLM`` that may run in a child process."""

    @property
    def process_id(self) -> int | None:
        """PID of the model's child process; ``None`` if the model runs in this process."""
        return getattr(self._evaluator, "process_id", None)

    def restart(self) -> None:
        """End the model's child process, and load the model and its adapters in a new one.

        Runs after the current batch and blocks the thread. Cached rows stay, cached keys and values
        are lost, and the evaluator's counts start at zero.

        Raises:
            ModelStateError: (``RuntimeError``) If the model runs in this process.
            Exception: Any error of loading; the call can be repeated.
        """
        if not isinstance(self._evaluator, RestartableEvaluator):
            raise ModelStateError("restart() needs a model in a child process; this model has none")
        self._info = self._call(self._evaluator.restart)
