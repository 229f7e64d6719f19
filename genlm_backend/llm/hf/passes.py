"""Passes: rows of a batch of contexts, from as few tokens through the model as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import final

import torch

from genlm_backend.cache import KVLayout, KVStore, PrefixTree, Slots
from genlm_backend.errors import QueryDroppedError
from genlm_backend.llm.hf.attend import Attend, WholeAttend
from genlm_backend.llm.hf.memory import is_out_of_memory, release_cached_memory
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
from genlm_backend.llm.query import Adapter, Query
from genlm_backend.llm.row import Row, rows_of_logits


@final
class Passes:
    """Forward passes for contexts of one adapter at a time, and what is kept of them.

    Contexts of one batch share what they have in common, with each other and with earlier
    contexts: match, plan, allocate, run, insert, unlock. Without slots, every context is run whole.

    Args:
        runner: What calls the model.
        cost: Cost of passes, by which a batch is divided.
        finish: Makes one row of each vector of logits, ``[n, vocab]``.
        check_wanted: Called before each pass; raises a ``QueryDroppedError`` where nobody waits.

    Attributes:
        runner: As given.
        cost: As given; it can be set.
        tree: The contexts that are kept.
        store: Their keys and values.
        attend: The way to attend to them.
        keeps: Whether keys and values are kept.
        tokens_reused: Number of tokens whose keys and values were there.
    """

    def __init__(
        self,
        runner: Runner,
        cost: CostModel,
        finish: Callable[[torch.Tensor], list[Row]] = rows_of_logits,
        check_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self.cost = cost
        self.tokens_reused = 0
        self._finish = finish
        self._check_wanted = check_wanted
        self.keep_nothing()

    def keep_nothing(self) -> None:
        """Let go of all slots, and run every context whole from now on."""
        self.keeps = False
        self.tree = PrefixTree(Slots(0))
        self.store = KVStore(KVLayout(), 0)
        self.attend: Attend = WholeAttend()

    def keep(self, store: KVStore, num_slots: int, attend: Attend) -> None:
        """Keep keys and values in a store from now on, and attend to them in one way."""
        self.keeps = True
        self.tree = PrefixTree(Slots(num_slots))
        self.store, self.attend = store, attend

    def evaluate(self, queries: list[Query]) -> list[Row]:
        """Return one row for each query. Out of memory, the batch is halved and tried again."""
        try:
            rows = self._from_slots(queries)
        except Exception as error:
            if not is_out_of_memory(error) or len(queries) == 1:
                raise
            rows = None  # outside of the handler, since the traceback holds the tensors
        if rows is None:
            release_cached_memory()
            return _in_halves(queries, self.evaluate)
        return rows

    def whole(self, queries: list[Query]) -> list[Row]:
        """Return one row for each query without reading or writing a slot."""
        rows: dict[int, Row] = {}
        for group in plan_groups([(len(query.token_ids), 0) for query in queries], self.cost):
            contexts = [queries[i].token_ids for i in group]
            spans = [Span(ids, outputs=(len(ids) - 1,)) for ids in contexts]
            rows.update(zip(group, self._forward(spans, WholeAttend()), strict=True))
        return [rows[i] for i in range(len(queries))]

    def _forward(self, spans: Sequence[Span], attend: Attend) -> list[Row]:
        self._check_wanted()
        return self._finish(self.runner.forward(spans, attend))

    # ---------------------------------------------------------------- with slots

    def _from_slots(self, queries: list[Query]) -> list[Row]:
        if not self.keeps:
            return self.whole(queries)
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
                self.tokens_reused += num_reused
                return self.whole(queries) if rows is None else rows
        finally:
            for job in jobs:
                self.tree.unlock(job.match)
        if len(queries) == 1:
            return self.whole(queries)
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
                    rows = self._forward([spans[i] for i in group], self.attend)
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


def _in_halves(queries: list[Query], evaluate: Callable[[list[Query]], list[Row]]) -> list[Row]:
    middle = len(queries) // 2
    return evaluate(queries[:middle]) + evaluate(queries[middle:])
