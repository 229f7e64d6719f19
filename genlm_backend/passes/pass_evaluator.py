"""PassEvaluator: the base of evaluators that make forward passes themselves."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch

from genlm_backend.attention.attend import Attend
from genlm_backend.model.evaluator import Evaluator, EvaluatorCounts
from genlm_backend.model.query import Query
from genlm_backend.model.row import Row, rows_of_logits, scores_of_logits
from genlm_backend.model.scoring import Answer, Question
from genlm_backend.passes.by_adapter import answers_by_adapter
from genlm_backend.passes.forwards import Forwards
from genlm_backend.passes.job import Asked, Found
from genlm_backend.passes.passes import Passes
from genlm_backend.passes.prefill_plan import CostModel
from genlm_backend.passes.prefix_cache import PrefixCache
from genlm_backend.passes.runner import Runner
from genlm_backend.prefix import TierName
from genlm_backend.runtime.memory import release_cached_memory
from genlm_backend.runtime.threads import frequent_switches


class PassEvaluator(Evaluator):
    """Answers queries by forward passes, and keeps what it has computed in a prefix cache.

    Args:
        runner: What calls the model.
        device_type: Type of the device that it computes on: "cpu", "cuda", "mps".
        attend_whole: The way to attend of contexts that are run whole.
        output_device: Where rows are returned; ``None`` for where the model computes them.

    Attributes:
        passes: The passes.
    """

    def __init__(
        self,
        runner: Runner,
        device_type: str,
        attend_whole: Attend,
        output_device: torch.device | None = None,
    ) -> None:
        self._output_device, self._max_kept = output_device, math.inf
        forwards = Forwards(runner, self._finished, self._scored, lambda: self.check_wanted())
        self.passes = Passes(forwards, CostModel.on(device_type), attend_whole)

    @torch.inference_mode()  # where its logits come from, which are overwritten
    def _finished(self, logits: torch.Tensor) -> list[Row]:
        return rows_of_logits(logits, self._output_device, self.undefined_ids, in_place=True)

    def _scored(self, logits: torch.Tensor, places: list[int], targets: list[int]) -> torch.Tensor:
        return scores_of_logits(logits, places, targets, self.undefined_ids)

    @abc.abstractmethod
    def _answers(self, questions: list[Asked]) -> list[Found]:
        """Return the answers to questions of one adapter, which is put in place."""

    def evaluate(self, queries: Sequence[Question]) -> Sequence[Answer | Exception]:
        """Return one answer to each query or scoring, adapter by adapter."""
        with frequent_switches():
            return answers_by_adapter(queries, self._answers)

    # ---------------------------------------------------------------- what is kept

    def num_cached(self, query: Query, tier: TierName | None = None) -> int:
        """Return how many of a context's tokens need not be computed again."""
        if len(query.context) > self._max_kept:
            return 0
        # The last token always goes through the model: its logits are the answer.
        passes, ids = self.passes, query.context.packed()
        num_new = passes.going_on.fewest if passes.cache.state_store.num_states else 1
        return passes.tree.num_cached(ids[: max(0, len(ids) - num_new)], query.adapter, tier)

    def forget(self, query: Query, keep: int) -> None:
        """Free the slots of a context beyond its first ``keep`` tokens."""
        self.passes.tree.forget(query.context.packed(), query.adapter, keep)

    def pin(self, query: Query) -> bool:
        """Compute a context and keep its slots until ``clear()``; return whether there was room."""
        node = self.passes.computed(query, self._answers)
        return node is not None and self.passes.cache.pin(node, self.passes.going_on.fewest)

    def _counted(self, packed_weight_bytes: int = 0) -> EvaluatorCounts:
        """Return the counts of the runner and the tree."""
        runner, tree, cache = self.passes.runner, self.passes.tree, self.passes.cache
        states, per_state = tree.states, cache.state_store.layout.bytes_per_state
        per_slot = cache.store.bytes_per_slot
        return EvaluatorCounts(
            num_forwards=runner.num_forwards,
            tokens_computed=runner.tokens_computed,
            tokens_reused=self.passes.tokens_reused,
            kv_bytes_used=tree.slots.num_used * per_slot,
            kv_bytes_budget=cache.budgets.kv,
            host_bytes_used=tree.host_slots.num_used * per_slot + states.host.num_used * per_state,
            host_bytes_budget=cache.budgets.host,
            num_evicted_tokens=tree.num_evicted,
            num_tokens_to_host=tree.num_to_host,
            num_tokens_from_host=tree.num_to_device,
            state_bytes_used=states.num_used * per_state,
            state_bytes_budget=cache.budgets.states,
            num_evicted_states=states.num_evicted,
            num_states_to_host=states.num_to_host,
            num_states_from_host=states.num_to_device,
            packed_weight_bytes=packed_weight_bytes,
        )

    def _let_go(self) -> None:
        """Let go of the model and of the slots, and give their memory back."""
        runner: Any = self.passes.runner
        self.passes.keep(PrefixCache(runner, self.passes.attend_whole))
        runner.model = None
        release_cached_memory()
