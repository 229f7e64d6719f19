"""PrefixCache: the prefix tree with the pools of its keys, values and recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.attention.forward_batch import AttentionBackend, BatchStates, Runner
from genlm_backend.prefix.budgets import Budgets, most_rows
from genlm_backend.prefix.kv_pool import KVLayout, KVPool
from genlm_backend.prefix.nodes import Nodes
from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.prefix.slot_allocator import SlotAllocator
from genlm_backend.prefix.state_cache import StateCache, StateLayout, StatePool
from genlm_backend.prefix.tier_copier import TierCopier
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import Adapter

NO_BUDGETS: Final = Budgets()


@final
class OutOfStates(Exception):
    """There is no room for a recurrent state from which later passes of the batch continue."""


@final
class PrefixCache:
    """The prefix tree of cached contexts, and the pools of their keys, values and states."""

    def __init__(
        self,
        runner: Runner,
        attention: AttentionBackend,
        pool: KVPool | None = None,
        num_slots: int = 0,
        host_pool: KVPool | None = None,
        num_host_slots: int = 0,
        states: StatePool | None = None,
        host_states: StatePool | None = None,
        budgets: Budgets = NO_BUDGETS,
        check_pin: Callable[[int], object] = lambda node: None,
        layout: KVLayout | None = None,  # for a model whose keys and values are not kept
    ) -> None:
        none = StatePool(StateLayout(), 0)
        self._runner, self.attention, self.keeps = runner, attention, pool is not None
        self.pool = KVPool(KVLayout(), 0) if pool is None else pool
        self.layout = layout or self.pool.layout
        self.state_pool = none if states is None else states
        self.host_state_pool = none if host_states is None else host_states
        self.budgets, self._check_pin = budgets, check_pin
        moves = None if host_pool is None else TierCopier(self.pool.codes, host_pool.codes)
        self.tree = PrefixTree(
            SlotAllocator(num_slots), SlotAllocator(num_host_slots), moves, self._states_of
        )

    def _states_of(self, nodes: Nodes) -> StateCache:
        states, host = self.state_pool, self.host_state_pool
        moves = TierCopier(states.codes, host.codes, first=1) if host.num_states else None
        return StateCache(nodes, states.num_states, host.num_states, moves)

    @property
    def most_rows(self) -> int | None:
        """Most rows of a pass, which copies a recurrent state per row; ``None`` for no bound."""
        return most_rows(self.state_pool.num_states) if self.state_pool.num_states else None

    # ---------------------------------------------------------------- contexts

    def match(self, context: Context, adapter: Adapter | None, most: int) -> int:
        """Return the node of the longest cached prefix of up to ``most`` tokens; touch it."""
        return self.tree.match(context.packed(0, most), adapter, context.cache_hint)

    def pin(self, node: int) -> bool:
        """Pin a node and, if states exist, the state of ``resumed(node)``; ``False`` on failure."""
        tree = self.tree
        self._check_pin(node)
        if tree.states.num_states and not tree.states.pin(self.resumed(node)):
            return False
        tree.pin(node)
        return True

    def resumed(self, node: int) -> int:
        """Return the deepest ancestor with a state, where repeats resume; if none, ``node``."""
        tree = self.tree
        start = int(tree.states.last(tree.nodes.parent[[node]])[0])
        return start if tree.nodes.depth[start] else node

    def fill(
        self,
        token_ids: Sequence[int],
        codes: Sequence[tuple[torch.Tensor, ...]],
        states: Sequence[torch.Tensor],
        num_resumed: int,
        adapter: Adapter | None,
    ) -> bool:
        """Cache a context from given keys, values and states; return whether there was room."""
        tree = self.tree
        tree.new_step()
        node = tree.match(token_ids, adapter)
        start = int(tree.nodes.depth[node])
        slots = tree.allocate(len(token_ids) - start, [node])
        if slots is None:
            return False
        new = tree.append(node, np.array(token_ids[start:], np.int32), slots)
        try:
            self.pool.put(slots, [tuple(c[start:] for c in layer) for layer in codes])
        except BaseException:
            tree.free(new)
            raise
        end = tree.insert(new)[-1:] if len(new) else np.array([node], np.int32)
        end = tree.nodes.ancestors(end, np.array([num_resumed], np.int32))
        if not states or tree.nodes.state[end[0]]:
            return True
        numbers = tree.states.give(end, np.ones(1, np.int64))  # needed: may evict others
        if numbers[0]:
            with tree.states.filling(end):
                self.state_pool.write(numbers, states)
        return bool(numbers[0])

    # ---------------------------------------------------------------- rows of a pass

    def states_behind(self, nodes: NDArray[np.int32]) -> BatchStates | None:
        """Return copies of the states after ``nodes``: either all of these are roots or none is."""
        if not self.state_pool.num_states:
            return None
        begins = not self.tree.nodes.depth[nodes].any()
        before = None if begins else self.state_pool.read(self.tree.nodes.state[nodes])
        return self._runner.running_states(self.state_pool.layout, before)

    def keep_states(
        self, nodes: NDArray[np.int32], num_needed: NDArray[Any], states: BatchStates
    ) -> None:
        """Store each row's state at its node; raise ``OutOfStates`` if a needed one has no room."""
        _, rows = np.unique(nodes, return_index=True)
        rows = np.sort(rows[nodes[rows] > 0])
        own = nodes[rows]
        numbers = self.tree.states.give(own, num_needed[rows])
        if (numbers[num_needed[rows] > 0] == 0).any():
            raise OutOfStates
        with self.tree.states.filling(own[numbers != 0]):
            for pool, of_tier in ((self.state_pool, numbers), (self.host_state_pool, -numbers)):
                given = np.flatnonzero(of_tier > 0)
                if len(given):
                    pool.write(of_tier[given], states.behind(rows[given]))

    def are_finite(self, nodes: NDArray[np.int32]) -> bool:
        """Return whether all keys, values and states of nodes are finite."""
        states = self.tree.nodes.state[nodes]
        return (
            self.pool.is_finite(self.tree.nodes.slot[nodes])
            and self.state_pool.is_finite(states[states > 0])
            and self.host_state_pool.is_finite(-states[states < 0])
        )
