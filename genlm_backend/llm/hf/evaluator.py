"""HFEvaluator: rows of a Hugging Face model, from as few tokens through it as possible."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, final

import torch

from genlm_backend.cache import KVLayout, KVStore, PrefixTree, Slots
from genlm_backend.errors import OptionError, QueryDroppedError
from genlm_backend.llm.evaluator import Evaluator, EvaluatorCounts, EvaluatorInfo
from genlm_backend.llm.hf.attend import Attend, WholeAttend
from genlm_backend.llm.hf.lora import Adapters
from genlm_backend.llm.hf.memory import default_kv_budget, is_out_of_memory, release_cached_memory
from genlm_backend.llm.hf.packing import Span
from genlm_backend.llm.hf.plan import (
    CostModel,
    Job,
    Segment,
    plan_groups,
    plan_segments,
    plan_waves,
)
from genlm_backend.llm.hf.runner import Runner
from genlm_backend.llm.hf.support import (
    KVSupport,
    check_model,
    examine,
    longest_context,
    rotary_limit,
    vocab_width,
)
from genlm_backend.llm.query import Adapter, Query
from genlm_backend.llm.row import Row, rows_of_logits
from genlm_backend.llm.threads import frequent_switches, use_num_threads

logger = logging.getLogger(__name__)


@final
class HFEvaluator(Evaluator):
    """Answers queries by a causal language model of transformers.

    Contexts of one batch share what they have in common, with each other and with earlier
    contexts: match, plan, allocate, run, insert, unlock. A model whose states cannot be kept token
    by token has a tree without slots, and runs every context whole.

    Args:
        model: The model, on whatever device; it is put into evaluation mode.
        max_length: Longest context to accept; ``None`` for what its config says.
        kv_cache_bytes: Bytes of keys and values to keep; ``None`` for a part of what is free.
        num_threads: Number of threads of a forward pass on the CPU; ``None`` for torch's own.
        output_device: Where rows are returned.

    Raises:
        UnsupportedModelError: If it is no causal language model.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
        num_threads: int | None = None,
        output_device: torch.device | None = None,
    ) -> None:
        check_model(model)
        model.eval()
        self.runner = Runner(model)
        self.cost = CostModel.on(self.runner.device.type)
        self.tree = PrefixTree(Slots(0))
        self.store = KVStore(KVLayout(), 0)
        self._attend: Attend = WholeAttend()
        self._keeps = False  # keys and values
        self._adapters = Adapters(model)
        self._max_length = longest_context(model) if max_length is None else max_length
        self._wanted_bytes = kv_cache_bytes
        self._budget = 0
        self._num_threads = num_threads
        self._output_device = output_device
        limit = rotary_limit(model)
        self._rotary_limit = math.inf if limit is None else limit
        self._tokens_reused = 0

    # ---------------------------------------------------------------- getting ready

    def open(self) -> EvaluatorInfo:
        """Find out what the model can do by a few tiny passes, and make room for what is kept."""
        runner = self.runner
        width = vocab_width(runner.model)
        if self._num_threads is not None:
            use_num_threads(self._num_threads)
        with self._adapters.in_place():
            support = examine(runner, width, self._max_length)
        if self._wanted_bytes != 0:
            self._make_room(support)
        runner.num_forwards = runner.tokens_computed = 0  # the examination is not the user's
        return EvaluatorInfo(
            vocab_size=width,
            max_length=self._max_length,
            num_slots=self.tree.num_slots if self._keeps else None,
            device=str(runner.device),
            can_forget=True,
            takes_adapters=True,
            uses_openmp=runner.device.type == "cpu",
        )

    def _make_room(self, support: KVSupport) -> None:
        layout, wanted = support.layout, self._wanted_bytes
        if support.reason:
            name = type(self.runner.model).__name__
            logger.info("%s runs every context whole: %s", name, support.reason)
            return
        budget = default_kv_budget(layout) if wanted is None else wanted
        num_slots = layout.num_slots(budget)
        try:
            self.store = KVStore(layout, num_slots)
        except (RuntimeError, MemoryError) as error:
            if wanted is None or not is_out_of_memory(error):
                raise
            raise OptionError(f"kv_cache_bytes={budget} do not fit into memory") from error
        self.tree = PrefixTree(Slots(num_slots))
        self._attend = support.attend(self.store)
        self._keeps = True
        self._budget = budget

    # ---------------------------------------------------------------- rows

    def evaluate(self, queries: Sequence[Query]) -> Sequence[Row | Exception]:
        """Return one row for each query, adapter by adapter."""
        answers: dict[Query, Row | Exception] = {}
        with frequent_switches():
            for adapter in dict.fromkeys(query.adapter for query in queries):
                own = [query for query in queries if query.adapter == adapter]
                try:
                    with self._adapters.in_place(adapter):
                        answers.update(zip(own, self._rows(own), strict=True))
                except QueryDroppedError:  # nobody waits for any of them
                    raise
                except Exception as error:  # raised for their callers, and no others
                    answers.update(dict.fromkeys(own, error))
        return [answers[query] for query in queries]

    def evaluate_whole(self, query: Query) -> Row:
        """Return the row of a context run whole and alone, past whatever is kept."""
        with self._adapters.in_place(query.adapter):
            (row,) = self._whole([query])
        return row

    def _rows(self, queries: list[Query]) -> list[Row]:
        # Where the model computes other rotary frequencies for long contexts, no key of a shorter
        # one is theirs: they share no keys, values or pass with others.
        apart = [query for query in queries if len(query.token_ids) > self._rotary_limit]
        if not apart:
            return self._together(queries)
        rows = {query: self._whole([query])[0] for query in apart}
        others = [query for query in queries if query not in rows]
        if others:
            rows.update(zip(others, self._together(others), strict=True))
        return [rows[query] for query in queries]

    def _together(self, queries: list[Query]) -> list[Row]:
        """Return one row for each query. Out of memory, the batch is halved and tried again."""
        try:
            rows = self._from_slots(queries)
        except Exception as error:
            if not is_out_of_memory(error) or len(queries) == 1:
                raise
            rows = None  # outside of the handler, since the traceback holds the tensors
        if rows is None:
            release_cached_memory()
            return _in_halves(queries, self._together)
        return rows

    def _whole(self, queries: list[Query]) -> list[Row]:
        """Return one row for each query without reading or writing a slot."""
        rows: dict[int, Row] = {}
        for group in plan_groups([(len(query.token_ids), 0) for query in queries], self.cost):
            contexts = [queries[i].token_ids for i in group]
            spans = [Span(ids, outputs=(len(ids) - 1,)) for ids in contexts]
            rows.update(zip(group, self._forward(spans, WholeAttend()), strict=True))
        return [rows[i] for i in range(len(queries))]

    def _forward(self, spans: Sequence[Span], attend: Attend) -> list[Row]:
        self.check_wanted()
        return rows_of_logits(self.runner.forward(spans, attend), self._output_device)

    # ---------------------------------------------------------------- with slots

    def _from_slots(self, queries: list[Query]) -> list[Row]:
        if not self._keeps:
            return self._whole(queries)
        # The last token always goes through the model: its logits are the answer.
        jobs = [
            Job(query.token_ids, self.tree.match(query.tokens[:-1], query.adapter))
            for query in queries
        ]
        try:
            segments = plan_segments(jobs, self.cost)
            slots = self.tree.allocate(sum(segment.num_tokens for segment in segments))
            if slots is not None:
                num_reused = sum(job.match.num_tokens for job in jobs)
                rows = self._run(jobs, segments, slots, queries[0].adapter)
                self._tokens_reused += num_reused
                return self._whole(queries) if rows is None else rows
        finally:
            for job in jobs:
                self.tree.unlock(job.match)
        if len(queries) == 1:
            return self._whole(queries)
        return _in_halves(queries, self._from_slots)

    def _run(
        self, jobs: list[Job], segments: list[Segment], slots: list[int], adapter: Adapter | None
    ) -> list[Row] | None:
        """Return the rows, or ``None`` if one is NaN; then nothing is kept.

        Where nobody waits for them any more, what has been computed is kept all the same.
        """
        taken = iter(slots)
        for segment in segments:
            segment.slots = [next(taken) for _ in range(segment.num_tokens)]
        held = dict.fromkeys(segments)  # whose slots are neither the tree's nor free
        computed: list[Segment] = []

        def keep() -> None:
            for segment in computed:
                self._insert(segment, adapter)
                del held[segment]

        try:
            for wave in plan_waves(segments):
                spans = [segment.span() for segment in wave]
                sizes = [(span.num_new, span.num_past) for span in spans]
                for group in plan_groups(sizes, self.cost):
                    rows = self._forward([spans[i] for i in group], self._attend)
                    computed += [wave[i] for i in group]
                    answered = [job for i in group for _, job in wave[i].outputs]
                    for job, row in zip(answered, rows, strict=True):
                        job.row = row
            rows = [job.row for job in jobs if job.row is not None]
            if any(row.is_nan for row in rows):
                # Attention gives what it masks a weight of zero, and zero times NaN is NaN. So a
                # context that overflows spoils the keys and values of its own beginning, which
                # other contexts share.
                return None
            keep()
        except QueryDroppedError:
            # There may be no row yet that would tell whether they have overflown.
            if self.store.is_finite([*chain.from_iterable(s.slots for s in computed)]):
                keep()
            raise
        finally:
            self.tree.free([*chain.from_iterable(segment.slots for segment in held)])
        return rows

    def _insert(self, segment: Segment, adapter: Adapter | None) -> None:
        """Hand one segment's slots to the tree, below what its context has there by now."""
        job = segment.job
        if job.match.num_tokens < segment.start:
            # An ancestor was inserted on behalf of another context of the batch.
            self.tree.unlock(job.match)
            job.match = self.tree.match(job.token_ids[: segment.start], adapter)
        job.match = self.tree.insert(job.match, segment.token_ids, segment.slots)

    # ---------------------------------------------------------------- what is kept

    def num_cached(self, query: Query) -> int:
        """Return how many of a context's tokens have their keys and values in slots."""
        if len(query.token_ids) > self._rotary_limit:
            return 0
        # The last token always goes through the model: its logits are the answer.
        return self.tree.num_cached(query.tokens[:-1], query.adapter)

    def forget(self, query: Query, keep: int) -> None:
        """Free the slots of a context beyond its first ``keep`` tokens."""
        self.tree.forget(query.tokens, query.adapter, keep)

    def pin(self, query: Query) -> bool:
        """Compute a context and keep its slots until ``clear()``; return whether there was room."""
        with self._adapters.in_place(query.adapter):
            self._rows([query])
        match = self.tree.match(query.tokens, query.adapter)
        if match.num_tokens < len(query.token_ids):
            self.tree.unlock(match)
            return False
        self.tree.pin(match)
        return True

    def clear(self) -> None:
        """Free all slots, pinned ones too."""
        self.tree.clear()

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter, and try it by a few tiny passes."""
        self._adapters.load(adapter, path, self._keeps)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Let go of an adapter, and free all slots."""
        self._adapters.remove(adapter)
        self.clear()

    # ---------------------------------------------------------------- keeping house

    def counts(self) -> EvaluatorCounts:
        """Return what the runner and the tree have counted."""
        return EvaluatorCounts(
            num_forwards=self.runner.num_forwards,
            tokens_computed=self.runner.tokens_computed,
            tokens_reused=self._tokens_reused,
            kv_bytes_used=self.tree.slots.num_used * self.store.bytes_per_slot,
            kv_bytes_budget=self._budget,
            num_evicted_tokens=self.tree.num_evicted,
        )

    def close(self) -> None:
        """Let go of the model and of the slots."""
        self.tree = PrefixTree(Slots(0))
        self.store = KVStore(KVLayout(), 0)
        self._attend, self._budget = WholeAttend(), 0
        self.runner.model = None
        self._adapters.close()
        release_cached_memory()


def _in_halves(queries: list[Query], evaluate: Callable[[list[Query]], list[Row]]) -> list[Row]:
    middle = len(queries) // 2
    return evaluate(queries[:middle]) + evaluate(queries[middle:])
