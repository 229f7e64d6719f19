"""LlamaEvaluator: evaluates queries with llama.cpp."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch

from genlm_backend.attention.forward_batch import AttentionBackend, ForwardBatch
from genlm_backend.backends.llama_cpp.binding import library
from genlm_backend.backends.llama_cpp.gguf_model import GGUFModel
from genlm_backend.backends.llama_cpp.llama_context import ContextSize, LlamaContext
from genlm_backend.backends.llama_cpp.llama_runner import LlamaRunner
from genlm_backend.backends.llama_cpp.sequence_states import (
    SequenceCounts,
    SequenceStateLayout,
    SequenceStateStore,
)
from genlm_backend.errors import CacheError, OptionError
from genlm_backend.prefix.budgets import Budgets
from genlm_backend.prefix.kv_pool import FREE_SLOTS, KVLayout
from genlm_backend.queries.evaluator import EvaluatorInfo
from genlm_backend.queries.query import Adapter, RowQuery
from genlm_backend.runtime.memory import cpu_budget, free_memory
from genlm_backend.scheduling.local_evaluator import LocalEvaluator
from genlm_backend.scheduling.prefill_plan import CostModel
from genlm_backend.scheduling.prefix_cache import PrefixCache

_PROBE_LENGTH: Final = 12
_SHARE_OF_SPREAD: Final = 0.02
_ROUNDING: Final = 1e-3
_BYTES_OF_CELL: Final = 12
"""Bytes of a token's position and sequence in a saved copy, besides keys and values."""


@final
class LlamaSupport(NamedTuple):
    """Bytes cached per token and per state, and the reason if the cache cannot be used."""

    bytes_per_token: int
    bytes_per_state: int = 0
    reason: str = ""


def llama_cpp_probe(model: GGUFModel, num_threads: int, cell_type: int) -> LlamaSupport:
    """Measure a model's cache, and check rows of copied sequences, in a small ``llama_context``."""
    # Half of a context is copied to a second sequence, and both are continued. The cache is used if
    # both rows differ from a whole pass's row by at most 1e-3, or 2 % of a wrong token's effect.
    num_cells, most_tokens = 8 * _PROBE_LENGTH, 4 * _PROBE_LENGTH
    has_states = int(model.has_states)
    counts = SequenceCounts(4, has_states, most_rows=has_states)
    size = ContextSize(num_cells, counts, most_tokens, num_threads, cell_type)
    context = LlamaContext(model, size)
    try:
        generator = random.Random(0)
        ids = [generator.randrange(model.vocab_size) for _ in range(_PROBE_LENGTH)]
        middle, state = _PROBE_LENGTH // 2, context.first_state
        wrong = [*ids[: middle - 1], (ids[middle - 1] + 1) % model.vocab_size, *ids[middle:]]
        nothing = context.num_bytes(0)
        _row(context, ids[:1], 0)
        one = context.num_bytes(0)
        of_state = context.num_bytes(context.first_passed) - nothing if has_states else 0
        _row(context, ids[1:2], 0, 1)
        of_token = max(0, context.num_bytes(0) - one - _BYTES_OF_CELL)
        _row(context, ids[2:middle], 0, 2)
        if has_states:
            context.copy_state(context.first_passed, state)
        _row(context, wrong[:middle][::-1], 0, middle)  # cut off again below
        context.copy(0, 1, middle)
        context.cut(0, middle)
        forked = _row(context, ids[middle:], 1, middle, state)
        other = _row(context, ids[middle:], 0, middle, state)
        whole, of_wrong = _row(context, ids, 2), _row(context, wrong, 3)
        tolerance = max(_ROUNDING, _SHARE_OF_SPREAD * _distance(whole, of_wrong))
        difference = max(_distance(forked, whole), _distance(other, whole))
        is_same = difference <= tolerance
        told = f"rows of forked contexts differ from rows of whole ones by {difference:.2g}"
        return LlamaSupport(of_token, of_state, "" if is_same else told)
    finally:
        context.close()


def _row(
    context: LlamaContext, ids: list[int], sequence: int, start: int = 0, state: int | None = None
) -> torch.Tensor:
    """Append tokens to a sequence, after ``state`` or the last call's state; return their row."""
    has_output = np.zeros(len(ids), np.int8)
    has_output[-1] = 1
    tokens, positions = np.array(ids, np.int32), np.arange(start, start + len(ids), dtype=np.int32)
    rows, before = np.array([sequence]), context.first_passed if state is None else state
    with context.in_states(rows, np.array([before]) if start else None):
        sequences = np.full(len(ids), sequence, np.int32)
        logits = context.compute(tokens, positions, sequences, has_output)
        if context.model.has_states:
            context.passed_states(rows)
    return logits[0].log_softmax(-1)


def _distance(row: torch.Tensor, other: torch.Tensor) -> float:
    return float((row - other).abs().max())


logger = logging.getLogger(__name__)

CELL_TYPES: Final = {"float32": 0, "float16": 1}
"""``kv_cache_dtype`` → ``GGML_TYPE_F32`` or ``GGML_TYPE_F16``."""

_CPU: Final = torch.device("cpu")
_DEFAULT_TOKENS: Final = 16384
_MOST_TOKENS: Final = 2048
_MOST_CELLS: Final = 1 << 30
_MOST_SEQUENCES: Final = 256
_DEFAULT_STATE_BYTES: Final = 1 << 30
_CONTEXTS_RUN_WHOLE: Final = 31
_NEVER_SPLIT: Final = 1e6


@final
class CellPool:
    """The KV pool of a prefix cache whose keys and values are in llama.cpp's cells."""

    layout = KVLayout()

    def __init__(self, bytes_per_slot: int) -> None:
        self.bytes_per_slot = bytes_per_slot

    def is_finite(self, slots: Any) -> bool:
        """Return ``True`` without reading cells: an overflow shows as NaN in later rows."""
        return True


@final
class LlamaCppAttention(AttentionBackend[None]):
    """llama.cpp's own attention, to the cells of a row's sequence."""

    @contextlib.contextmanager
    def forward_context(self, batch: ForwardBatch, model: Any) -> Iterator[None]:
        """Do nothing: llama.cpp finds a row's cells by its sequence."""
        yield


def load_evaluator(path: str, num_gpu_layers: int, options: Mapping[str, Any]) -> LlamaEvaluator:
    model = GGUFModel(path, num_gpu_layers)
    try:
        return LlamaEvaluator(model, **options)
    except BaseException:
        model.close()
        raise


@final
class LlamaEvaluator(LocalEvaluator):
    """Evaluates queries with a GGUF model; keys and values are in llama.cpp's unified cache."""

    _runner: LlamaRunner

    def __init__(
        self,
        model: GGUFModel,
        *,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
        kv_cache_dtype: str | None = None,
        num_threads: int | None = None,
        eos_token_ids: Collection[int] | None = None,
    ) -> None:
        self._model, self._wanted_length, self._wanted_bytes = model, max_length, kv_cache_bytes
        self._ends = model.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._dtype = "float16" if kv_cache_dtype is None else kv_cache_dtype
        threads = torch.get_num_threads() if num_threads is None else num_threads
        support = self._support = llama_cpp_probe(model, threads, CELL_TYPES[self._dtype])
        if support.reason:
            logger.info("%s runs contexts whole: %s", model.path, support.reason)
        keeps = not support.reason and kv_cache_bytes != 0
        counts = self._counts = self._sequence_counts(keeps=keeps)
        num_tokens = self._num_tokens(keeps=keeps)
        self._num_slots = num_tokens if keeps else 0
        # By default, about a quarter of the tokens or more is left for pinned prompts.
        most = min(model.num_trained, -(-3 * num_tokens // 4))
        length = self._length = most if max_length is None else max_length
        num_cells = num_tokens if keeps else max(length, min(num_tokens, _MOST_TOKENS))
        size = ContextSize(num_cells, counts, _MOST_TOKENS, threads, CELL_TYPES[self._dtype])
        self._context = LlamaContext(model, size)
        self._adapters: dict[Adapter, Any] = {}
        self._adapter: Adapter | None = None
        has_cells = support.bytes_per_token > 0
        runner = LlamaRunner(self._context, length, self._num_slots, has_cells=has_cells)
        # Each row of a batch needs a sequence, and pinned prompts may take half of the sequences.
        self._most_rows = counts.most_rows or counts.num_contexts // (2 if keeps else 1)
        cost = replace(
            CostModel.on("cpu"),  # without padding, splitting a batch saves nothing
            per_forward=_NEVER_SPLIT,
            max_chunk=_MOST_TOKENS // 4,
            max_tokens=min(_MOST_TOKENS, num_cells),
            max_rows=self._most_rows,
        )
        super().__init__(runner, cost, LlamaCppAttention(), _CPU)

    def _num_tokens(self, *, keeps: bool) -> int:
        of_token, wanted = self._support.bytes_per_token, self._wanted_length or 0
        if not of_token:
            self._check_room(self._state_bytes)
            num_tokens = FREE_SLOTS
        elif self._wanted_bytes and keeps:
            self._check_room(self._wanted_bytes)
            num_tokens = min((self._wanted_bytes - self._state_bytes) // of_token, _MOST_CELLS)
            if num_tokens < 1:
                others = ", beside the recurrent states" if self._state_bytes else ""
                raise OptionError(
                    f"kv_cache_bytes={self._wanted_bytes} has no room for one token, which takes "
                    f"{of_token} bytes{others}: raise it, or set 0 to cache nothing"
                )
        else:
            num_tokens = min(max(1, cpu_budget() // of_token), max(_DEFAULT_TOKENS, wanted))
        if wanted > num_tokens:
            raise OptionError(
                f"max_length={wanted} needs {wanted * of_token} bytes for keys and values, but "
                f"only {num_tokens * of_token} are available: lower max_length"
                f"{', or raise kv_cache_bytes' if self._wanted_bytes and keeps else ''}"
            )
        return num_tokens

    def _check_room(self, num_bytes: int) -> None:
        """Raise an ``OptionError`` if ``num_bytes`` are not free; skip the check in a GPU build."""
        free = free_memory()
        if num_bytes > free and not library().llama_supports_gpu_offload():
            raise OptionError(
                f"kv_cache_bytes={self._wanted_bytes}: the cache takes {num_bytes} bytes at once, "
                f"but only {free} bytes of memory are free"
            )

    def _sequence_counts(self, *, keeps: bool) -> SequenceCounts:
        """Return how many sequences hold contexts, kept recurrent states, and states of a pass."""
        most = min(_MOST_SEQUENCES, int(library().llama_max_parallel_sequences()))
        of_state, wanted = self._support.bytes_per_state, self._wanted_bytes
        if of_state and not keeps:
            return SequenceCounts(_CONTEXTS_RUN_WHOLE)
        if not of_state:
            return SequenceCounts(most - 1)
        parts = 2 if self._support.bytes_per_token else 1
        num_bytes = (cpu_budget() if wanted is None else wanted) // parts
        usual = num_bytes if wanted else min(num_bytes, _DEFAULT_STATE_BYTES)
        counts = SequenceCounts.within(min(most, usual // of_state))
        least = counts.total * of_state
        if least > num_bytes:
            raise OptionError(
                f"the recurrent states of this model take at least {least} bytes, {of_state} for "
                f"each of {counts.total} sequences of llama.cpp, but only "
                f"{num_bytes}{' (half of the cache)' if parts > 1 else ''} are available: "
                f"set kv_cache_bytes={parts * least} or more, or 0 to cache nothing"
            )
        return counts

    @property
    def _state_bytes(self) -> int:
        """Bytes that the recurrent states of all sequences take."""
        return self._counts.total * self._support.bytes_per_state

    # ---------------------------------------------------------------- opening, pinning, adapters

    def open(self) -> EvaluatorInfo:
        """Make the prefix cache, if anything is kept; return the model's capabilities."""
        num_slots, num_states = self._num_slots, self._counts.num_states
        of_token, of_state = self._support.bytes_per_token, self._support.bytes_per_state
        if num_slots:
            pool: Any = CellPool(of_token)
            states: Any = None
            if of_state:
                context = self._context
                states = SequenceStateStore(
                    SequenceStateLayout(of_state),
                    num_states,
                    context.first_state,
                    context.copy_state,
                )
            made = num_slots * of_token + self._state_bytes
            cache = PrefixCache(
                self._runner,
                self.scheduler.uncached_attention,  # cached rows too: llama.cpp attends by itself
                pool,
                num_slots,
                states=states,
                budgets=Budgets(self._wanted_bytes or made, 0, num_states * of_state),
                check_pin=self._check_pin,
            )
            self._schedule(cache, self.scheduler.uncached_attention)
        self._runner.tree = self.scheduler.tree
        return EvaluatorInfo(
            vocab_size=self._model.vocab_size,
            max_length=self._length,
            max_batch_size=self._most_rows,
            num_slots=num_slots or None,
            num_states=num_states or None,
            kv_cache_dtype=self._dtype if num_slots else None,
            device="cpu",
            takes_adapters=True,
            uses_openmp=True,  # callers' idle OpenMP threads slow llama.cpp's down too
            scores=True,
            omits_undefined=True,
            reads_out=True,
            eos_token_ids=self._ends,
        )

    def _check_pin(self, node: int) -> None:
        """Raise a ``CacheError`` unless pinned prompts leave room for a batch."""
        tree = self.scheduler.tree
        num_pins, num_tokens = tree.pinned_with(node)
        if num_tokens + self._length > tree.num_slots:
            raise CacheError(
                f"with this prompt, {num_tokens} pinned tokens leave no room for the longest "
                f"context, of {self._length} tokens, in the cache of {tree.num_slots} tokens: "
                "raise kv_cache_bytes, or load the model with a lower max_length"
            )
        if num_pins > self._most_rows:
            raise CacheError(
                f"{self._most_rows} prompts are pinned, and more would leave too few of "
                "llama.cpp's sequences for a batch"
            )

    def pin(self, query: RowQuery) -> bool:
        """Compute a context and keep it until ``clear()``; return whether there was room."""
        is_pinned = super().pin(query)
        if is_pinned:
            tree = self.scheduler.tree
            self._runner.pin(tree.match(query.context.packed(), query.adapter))
        return is_pinned

    @contextlib.contextmanager
    def _in_place(self, adapter: Adapter | None) -> Iterator[None]:
        """Activate an adapter, or none, for later passes; after a NaN, clear the cache first."""
        if self._runner.has_nan:
            self._runner.clear()
        if adapter != self._adapter:
            self._context.use_adapter(None if adapter is None else self._adapters[adapter])
            self._adapter = adapter
        yield

    # ---------------------------------------------------------------- freeing

    def clear(self) -> None:
        """Free all slots, pinned ones too."""
        self._runner.clear()

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        self._adapters[adapter] = self._model.adapter(adapter.name, path)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Free an adapter, and free all slots."""
        with self._in_place(None):
            self._model.free_adapter(self._adapters.pop(adapter))
        self.clear()

    def close(self) -> None:
        """Free llama.cpp's context and the model."""
        self._let_go()
        self._context.close()
        self._model.close()
