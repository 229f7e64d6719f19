"""LocalEvaluator: base class of evaluators that run forward passes in this process."""

from __future__ import annotations

import abc
import logging
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from operator import attrgetter
from typing import Any, Final, final

import torch

from genlm_backend.attention.forward_batch import AttentionBackend, Runner
from genlm_backend.errors import QueryDroppedError
from genlm_backend.prefix.budgets import TierName
from genlm_backend.queries.evaluator import Evaluator, EvaluatorCounts
from genlm_backend.queries.query import Adapter, Query, Result, RowQuery
from genlm_backend.queries.row import Row, rows_on
from genlm_backend.readouts.readout import answers_by_rows
from genlm_backend.runtime.memory import release_cached_memory
from genlm_backend.runtime.threads import frequent_switches
from genlm_backend.scheduling.output_processor import OutputProcessor
from genlm_backend.scheduling.prefill_plan import CostModel
from genlm_backend.scheduling.prefix_cache import PrefixCache
from genlm_backend.scheduling.scheduler import ALL, Capabilities, Scheduler, in_parts

logger = logging.getLogger(__name__)


class LocalEvaluator(Evaluator):
    """Answers queries by forward passes, with keys, values and states in a prefix cache."""

    _runner: Any

    def __init__(
        self,
        runner: Runner,
        cost: CostModel,
        uncached_attention: AttentionBackend,
        output_device: torch.device | None = None,
    ) -> None:
        self._output_device, self._is_room_short = output_device, False
        self._outputs = OutputProcessor(lambda: self.undefined_ids, output_device)
        self._runner, self._cost = runner, cost
        self._schedule(PrefixCache(runner, uncached_attention), uncached_attention)

    def _schedule(
        self, cache: PrefixCache, uncached_attention: AttentionBackend, can: Capabilities = ALL
    ) -> None:
        """Replace the scheduler by a new one over ``cache``."""
        self.scheduler = Scheduler(
            self._runner,
            self._outputs,
            self._cost,
            cache,
            uncached_attention,
            lambda: self.check_cancelled(),
            can,
        )

    @abc.abstractmethod
    def _in_place(self, adapter: Adapter | None) -> AbstractContextManager[object]:
        """Return a context manager in which passes use ``adapter``; ``None`` for the base model."""

    @final
    def evaluate(self, queries: Sequence[Query], /) -> Sequence[Result | Exception]:
        """Return one answer per query; readouts are computed on the model's device."""
        with frequent_switches():
            if not any(map(_IS_READ_OFF, queries)):
                return self._answers(queries)
            self._outputs.device = None  # rows stay on the model's device, for the readouts
            try:
                answers = answers_by_rows(self._answers, queries)
            finally:
                self._outputs.device = self._output_device
            if self._output_device is not None:
                rows = {i: answer for i, answer in enumerate(answers) if isinstance(answer, Row)}
                moved = rows_on([*rows.values()], self._output_device)
                for i, row in zip(rows, moved, strict=True):
                    answers[i] = row
            return answers

    def _answers(self, queries: Sequence[Query]) -> list[Result | Exception]:
        """Return the answer to each query, or its error; evaluate one adapter after another."""
        if len(set(map(_ADAPTER, queries))) > 1:
            indices: defaultdict[Adapter | None, list[int]] = defaultdict(list)
            for index, query in enumerate(queries):
                indices[query.adapter].append(index)
            return in_parts(queries, indices.values(), self._answers)
        try:
            with self._in_place(queries[0].adapter):
                answers = [*self.scheduler.evaluate(list(queries))]
            if not self._is_room_short:
                self._tell_if_room_is_short()
            return answers
        except QueryDroppedError:
            raise
        except Exception as error:  # the error goes only to the callers of these queries
            pictured = [i for i, q in enumerate(queries) if q.context.pictures is not None]
            if len(queries) == 1 or not pictured:
                return [error] * len(queries)
        # The model may have refused one context's pictures: run contexts with pictures one by one.
        others = [i for i, q in enumerate(queries) if q.context.pictures is None]
        return in_parts(queries, [others, *([i] for i in pictured)], self._answers)

    def _tell_if_room_is_short(self) -> None:
        """Warn once if many tokens, half of those computed or more, were recomputed or not kept."""
        tree, cache = self.scheduler.tree, self.scheduler.cache
        num_again = tree.num_recomputed + self.scheduler.tokens_without_room
        num_slots = tree.num_slots if cache.pool.bytes_per_slot else 0
        if num_again < max(_FEWEST_AGAIN, num_slots):
            return
        num_computed = self._runner.tokens_computed
        if 2 * num_again < num_computed:
            return
        self._is_room_short = True
        num_states = cache.state_pool.num_states
        rooms = [f"the keys and values of {num_slots} tokens"] if num_slots else []
        rooms += [f"{num_states} recurrent states"] if num_states else []
        said = (
            f"the cache has room for {' and '.join(rooms)}, but the contexts in use need more: "
            f"{num_again} of {num_computed} tokens were computed again, or could not be kept. "
            f"Raise kv_cache_bytes (now {cache.budgets.kv}), or query fewer contexts at a time"
        )
        logger.warning(said)
        # Callers are on other threads, so name no source line: it would be one of this thread.
        where = {"filename": "<genlm_backend>", "lineno": 0, "module": __name__}
        with suppress(Warning):  # a filter that makes the warning an error must not fail the batch
            warnings.warn_explicit(said, RuntimeWarning, **where)

    @final
    def evaluate_whole(self, query: RowQuery) -> Row:
        """Return the row of a context, computed alone and without the cache."""
        with self._in_place(query.adapter):
            return self.scheduler.row_alone(query)

    # ---------------------------------------------------------------- the cache

    def num_cached(self, query: RowQuery, tier: TierName | None = None) -> int:
        """Return how many of a context's tokens are cached; the last token does not count."""
        if len(query.context) > self.scheduler.can.max_cacheable_len:
            return 0
        # The last token always goes through the model: its logits are the answer.
        tree, ids = self.scheduler.tree, query.context.packed()
        return tree.num_cached(ids[:-1], query.adapter, tier)

    def pin(self, query: RowQuery) -> bool:
        """Compute a context and cache it until ``clear()``; return whether there was room."""
        with self._in_place(query.adapter):
            node = self.scheduler.computed(query)
        return node is not None and self.scheduler.cache.pin(node)

    def counts(self) -> EvaluatorCounts:
        runner, tree, cache = self._runner, self.scheduler.tree, self.scheduler.cache
        states, per_state = tree.states, cache.state_pool.layout.bytes_per_state
        per_slot = cache.pool.bytes_per_slot
        return EvaluatorCounts(
            num_forwards=runner.num_forwards,
            tokens_computed=runner.tokens_computed,
            tokens_reused=self.scheduler.tokens_reused,
            kv_bytes_used=tree.slots.num_used * per_slot,
            kv_bytes_budget=cache.budgets.kv,
            host_bytes_used=tree.host_slots.num_used * per_slot + states.host.num_used * per_state,
            host_bytes_budget=cache.budgets.host,
            num_evicted_tokens=tree.num_evicted,
            num_recomputed_tokens=tree.num_recomputed,
            num_tokens_to_host=tree.num_to_host,
            num_tokens_from_host=tree.num_to_device,
            state_bytes_used=states.num_used * per_state,
            state_bytes_budget=cache.budgets.states,
            num_evicted_states=states.num_evicted,
            num_states_to_host=states.num_to_host,
            num_states_from_host=states.num_to_device,
        )

    def _let_go(self) -> None:
        """Drop the references to the model and the cache, and free their memory."""
        runner, uncached_attention = self._runner, self.scheduler.uncached_attention
        runner.model = None
        self._schedule(PrefixCache(runner, uncached_attention), uncached_attention)
        release_cached_memory()


_ADAPTER, _IS_READ_OFF = attrgetter("adapter"), attrgetter("needs_row")

_FEWEST_AGAIN: Final = 256
"""Fewest tokens, recomputed or not kept for lack of room, at which a warning is given."""
