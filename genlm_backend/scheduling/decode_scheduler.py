"""DecodeScheduler: steps of many contexts by one token each, as arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.cached_prefixes import CachedPrefixes
from genlm_backend.attention.cascade_plan import CascadePlan
from genlm_backend.attention.forward_batch import pack_decode
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import Query
from genlm_backend.queries.row import Row
from genlm_backend.scheduling.forwards import Forwards
from genlm_backend.scheduling.prefill_plan import CostModel
from genlm_backend.scheduling.prefix_cache import PrefixCache
from genlm_backend.scheduling.scheduled_query import PICTURES

NUM_REMEMBERED: Final = 8
"""Decode steps whose plans are remembered: as many batches as particles may take in turn."""


class _RememberedPlan(NamedTuple):
    """The plan of a decode step, from which that of a later one may go on."""

    plan: CascadePlan
    node_uses: NDArray[np.int64]  # [B] int64
    order: NDArray[np.intp]  # [B]

    def find(self, node_uses: NDArray[np.int64]) -> NDArray[np.intp] | None:
        """Return which of the contexts came to nodes; ``None`` if not all are of this step."""
        found = np.searchsorted(self.node_uses, node_uses[:1]).clip(max=len(self.node_uses) - 1)
        if self.node_uses[found[0]] != node_uses[0]:  # as of most steps, at the cost of one look
            return None
        found = np.searchsorted(self.node_uses, node_uses).clip(max=len(self.node_uses) - 1)
        return self.order[found] if (self.node_uses[found] == node_uses).all() else None


@final
class DecodeScheduler:
    """Steps of contexts of which everything but the last token is cached."""

    def __init__(self, forwards: Forwards, cache: PrefixCache) -> None:
        self._forwards, self._cache = forwards, cache
        # If all contexts go on from those of one earlier step, the next plan is that one's, its
        # rows permuted, with a column more; otherwise it is made anew.
        self._remembered: deque[_RememberedPlan] = deque(maxlen=NUM_REMEMBERED)
        self._valid_for: tuple[object, ...] = ()  # what these depend on beside their nodes

    def accepts(
        self,
        queries: Sequence[Query],
        nodes: NDArray[np.int32],
        sizes: NDArray[np.int32],
        cost: CostModel,
        needs_equal_lengths: bool,
    ) -> bool:
        """Return whether each query has one token that is not cached, and all fit one pass."""
        depths = self._cache.tree.nodes.depth[nodes]
        least, deepest = int(depths.min()), int(depths.max())
        return (
            len(queries) <= min(cost.max_tokens, cost.max_rows)
            and bool((depths == sizes).all())
            and (not self._cache.state_pool.num_states or least > 0 or deepest == 0)
            and (deepest == least if needs_equal_lengths else deepest <= 2 * least + 64)
            and not any(map(PICTURES, queries))
        )

    def run(
        self, contexts: Sequence[Context], nodes: NDArray[np.int32]
    ) -> tuple[list[Row], NDArray[np.int32]] | None:
        """Compute the rows after contexts; ``None`` if there is no room."""
        forwards, cache, tree = self._forwards, self._cache, self._cache.tree
        tokens = np.frombuffer(b"".join([c.last_packed for c in contexts]), np.int32)
        slots = tree.allocate(len(nodes), nodes)
        if slots is None:
            return None
        new = tree.append_nodes(nodes, tokens, slots)
        try:
            forwards.check_cancelled()
            past = CachedPrefixes.of(tree.nodes, nodes)
            plan = self._plan(nodes, past)
            states = cache.states_behind(nodes)
            batch = pack_decode(tokens.astype(np.int64), slots, past, plan, states)
            rows = forwards.finish(forwards.runner.forward(batch, cache.attention))
            is_sound = ~np.isnan(np.array([row.logsumexp for row in rows], np.float64))
        except BaseException:
            tree.free(new)
            raise
        if states is not None:
            tree.states.go_on_from(nodes)
        if is_sound.all():
            kept = tree.insert(new)
        else:
            kept = np.zeros(len(rows), np.int32)
            kept[is_sound] = tree.insert(new[is_sound])
            tree.free(new[~is_sound])
            plan = None
        if states is not None:
            cache.keep_states(kept, np.zeros(len(kept), np.int64), states)
        if plan is not None:
            node_uses = tree.nodes.node_uses(kept)
            order = np.argsort(node_uses)
            self._remembered.append(_RememberedPlan(plan, node_uses[order], order))
        for context, hint in zip(contexts, tree.nodes.cache_hints(kept), strict=True):
            context.cache_hint = hint
        return rows, kept

    def _plan(self, nodes: NDArray[np.int32], past: CachedPrefixes) -> CascadePlan | None:
        """Return how a step after nodes reads their cached tokens."""
        attention, tree = self._cache.attention, self._cache.tree
        # While these are the same, nodes are where they were.
        valid_for = tree.nodes.key, tree.num_slot_changes, attention
        if valid_for != self._valid_for:
            self._valid_for = valid_for
            self._remembered.clear()
        node_uses = tree.nodes.node_uses(nodes)
        for last in reversed(self._remembered):
            found = last.find(node_uses)
            if found is not None and not last.plan.is_stale:
                return last.plan.advanced(found, tree.nodes.slot[nodes].astype(np.int64))
        return attention.plan(past, np.ones(len(nodes), np.int64))
