"""From queries to rows: match, plan, allocate, run, insert, release."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain

import torch

from genlm_backend.cache import Match, NullPrefixCache, PrefixCache, RadixPrefixCache
from genlm_backend.cache.pool import KVPool
from genlm_backend.errors import QueryDroppedError
from genlm_backend.llm.hf.memory import is_out_of_memory, release_cached_memory
from genlm_backend.llm.hf.packing import Row
from genlm_backend.llm.hf.runner import Runner
from genlm_backend.llm.hf.schedule import (
    CostModel,
    Job,
    Segment,
    plan_groups,
    plan_segments,
    plan_waves,
)
from genlm_backend.llm.query import Query

Finish = Callable[[torch.Tensor], list[torch.Tensor]]


class Evaluator:
    """Answers batches of queries with as few tokens through the model as the cache allows.

    Args:
        runner: What calls the model.
        pool: Slots for keys and values, or ``None`` to run every context whole.
        cost: What forward passes cost, for dividing a batch into several.
        finish: From logits ``[n, model_vocab]`` to ``n`` log-probability rows.
        rotary_limit: The longest context whose positions the model reads as in shorter ones, or
            ``None`` if it reads all alike. Longer ones run whole, each alone.
        check_wanted: Called before each forward pass; raises a ``QueryDroppedError`` where nobody
            waits for it any more.
    """

    def __init__(
        self,
        runner: Runner,
        pool: KVPool | None,
        cost: CostModel,
        finish: Finish,
        rotary_limit: int | None = None,
        check_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self.pool = pool
        self.prefixes: PrefixCache = NullPrefixCache() if pool is None else RadixPrefixCache(pool)
        self.cost = cost
        self.tokens_reused = 0
        self._finish = finish
        self._rotary_limit = rotary_limit
        self._check_wanted = check_wanted

    def is_apart(self, query: Query) -> bool:
        """Whether a context shares no keys, values or pass with others; see ``rotary_limit``."""
        return self._rotary_limit is not None and len(query.token_ids) > self._rotary_limit

    def evaluate(self, queries: Sequence[Query]) -> list[torch.Tensor]:
        """Return one row for each query. Out of memory, the batch is halved and tried again."""
        rows = {query: self.whole([query])[0] for query in queries if self.is_apart(query)}
        others = [query for query in queries if query not in rows]
        if others:
            rows.update(zip(others, self._together(others), strict=True))
        return [rows[query] for query in queries]

    def _together(self, queries: Sequence[Query]) -> list[torch.Tensor]:
        try:
            rows = self._with_slots(queries)
        except Exception as error:
            if not is_out_of_memory(error) or len(queries) == 1:
                raise
            rows = None  # outside of the handler, since the traceback holds the tensors
        if rows is None:
            release_cached_memory()
            return self._in_halves(queries, self._together)
        return rows

    def whole(self, queries: Sequence[Query]) -> list[torch.Tensor]:
        """Return one row for each query without reading or writing a slot."""
        rows: list[torch.Tensor] = [torch.empty(0)] * len(queries)
        lengths = [(len(query.token_ids), 0) for query in queries]
        for group in plan_groups(lengths, self.cost):
            token_ids = [queries[i].token_ids for i in group]
            batch = [Row(ids, outputs=(len(ids) - 1,)) for ids in token_ids]
            self._collect(rows, group, self._forward(batch))
        return rows

    def _forward(self, rows: Sequence[Row], pool: KVPool | None = None) -> torch.Tensor:
        self._check_wanted()
        return self.runner.forward(rows, pool)

    def pin(self, query: Query) -> bool:
        """Compute the query's context and keep its slots until the cache is cleared.

        Returns:
            Whether there was room; where a model runs every context whole there never is.
        """
        self.evaluate([query])
        match = self.prefixes.match(query.token_ids, query.namespace)
        if match.num_tokens < len(query.token_ids):
            self.prefixes.release(match)
            return False
        self.prefixes.pin(match)
        return True

    def close(self) -> None:
        """Let go of the model and of the slots; no evaluation may follow."""
        self.prefixes = NullPrefixCache()
        self.pool = None
        self.runner.model = None

    # ---------------------------------------------------------------- with slots

    def _with_slots(self, queries: Sequence[Query]) -> list[torch.Tensor]:
        if self.pool is None:
            return self.whole(queries)
        # The last token always goes through the model: its logits are the answer.
        matches = [self.prefixes.match(q.token_ids[:-1], q.namespace) for q in queries]
        try:
            jobs = [
                Job(query.token_ids, match.num_tokens, query.namespace)
                for query, match in zip(queries, matches, strict=True)
            ]
            segments = plan_segments(jobs, self.cost)
            slots = self.prefixes.allocate(sum(segment.num_tokens for segment in segments))
            if slots is not None:
                rows = self._run(queries, matches, segments, slots)
                self.tokens_reused += sum(job.num_cached for job in jobs)
                return rows if rows is not None else self.whole(queries)
        finally:
            for match in matches:
                self.prefixes.release(match)
        if len(queries) == 1:
            return self.whole(queries)
        return self._in_halves(queries, self._with_slots)

    def _in_halves(
        self, queries: Sequence[Query], evaluate: Callable[[Sequence[Query]], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        middle = len(queries) // 2
        return evaluate(queries[:middle]) + evaluate(queries[middle:])

    def _run(
        self,
        queries: Sequence[Query],
        matches: list[Match],
        segments: list[Segment],
        slots: list[int],
    ) -> list[torch.Tensor] | None:
        """Return the rows, or ``None`` if one is NaN; then nothing is kept.

        Where nobody waits for them any more, what has been computed is kept all the same.
        """
        rows: list[torch.Tensor] = [torch.empty(0)] * len(queries)
        own: dict[Segment, list[int]] = {}
        taken = 0
        for segment in segments:
            own[segment] = slots[taken : taken + segment.num_tokens]
            taken += segment.num_tokens
        held = dict.fromkeys(segments)  # whose slots are neither the tree's nor free
        computed: list[Segment] = []

        def keep() -> None:
            for segment in computed:
                self._insert(queries, matches, segment, own)
                del held[segment]

        try:
            for wave in plan_waves(segments):
                work = {segment: self._row(queries, matches, segment, own) for segment in wave}
                sizes = [(len(row.token_ids), len(row.past_slots)) for row in work.values()]
                for group in plan_groups(sizes, self.cost):
                    members = [wave[i] for i in group]
                    logits = self._forward([work[s] for s in members], self.pool)
                    computed += members
                    answered = [job for s in members for _, job in s.outputs]
                    if answered:
                        self._collect(rows, answered, logits)
            if torch.stack([row[0] for row in rows]).isnan().any():
                # Attention gives what it masks a weight of zero, and zero times NaN is NaN. So a
                # context that overflows spoils the keys and values of its own beginning, which
                # other contexts share.
                return None
            keep()
        except QueryDroppedError:
            # There may be no row yet that would tell whether they have overflown.
            assert self.pool is not None
            if self.pool.is_finite([*chain.from_iterable(own[segment] for segment in computed)]):
                keep()
            raise
        finally:
            self.prefixes.free([*chain.from_iterable(own[segment] for segment in held)])
        return rows

    def _row(
        self,
        queries: Sequence[Query],
        matches: list[Match],
        segment: Segment,
        own: dict[Segment, list[int]],
    ) -> Row:
        past: list[int] = []  # of tokens that earlier waves of this batch have computed
        ancestor, position = segment.parent, segment.start
        while ancestor is not None:
            past = own[ancestor][: position - ancestor.start] + past
            position, ancestor = ancestor.start, ancestor.parent
        return Row(
            token_ids=queries[segment.job].token_ids[segment.start : segment.stop],
            past_slots=array("q", matches[segment.job].slots[:position]) + array("q", past),
            slots=own[segment],
            outputs=[position - segment.start for position, _ in segment.outputs],
        )

    def _insert(
        self,
        queries: Sequence[Query],
        matches: list[Match],
        segment: Segment,
        own: dict[Segment, list[int]],
    ) -> None:
        """Hand one segment's slots to the tree, below what its context has there by now."""
        match, query = matches[segment.job], queries[segment.job]
        if match.num_tokens < segment.start:
            # An ancestor was inserted on behalf of another context of the batch.
            self.prefixes.release(match)
            match = self.prefixes.match(query.token_ids[: segment.start], query.namespace)
            matches[segment.job] = match
        if match.num_tokens != segment.start:  # cleared meanwhile: nothing to hang it on
            self.prefixes.free(own[segment])
            return
        token_ids = query.token_ids[segment.start : segment.stop]
        matches[segment.job] = self.prefixes.insert(match, token_ids, own[segment])

    def _collect(self, rows: list[torch.Tensor], indices: list[int], logits: torch.Tensor) -> None:
        for index, row in zip(indices, self._finish(logits), strict=True):
            rows[index] = row
