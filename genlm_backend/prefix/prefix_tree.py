"""PrefixTree: the cached prefixes, as a tree over token ids whose nodes own slots.

Tests compare it with ``naive_longest_prefix`` in tests/naive.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import CacheError
from genlm_backend.prefix import node_loops
from genlm_backend.prefix.budgets import TierName
from genlm_backend.prefix.nodes import NO_HINT, PINNED, CacheHint, Ints, Nodes
from genlm_backend.prefix.slot_allocator import SlotAllocator
from genlm_backend.prefix.state_cache import NO_STATE, StateCache
from genlm_backend.prefix.tier_copier import TierCopier


@final
class PrefixTree:
    """A tree over token ids with one slot per node, a fixed budget, and LRU eviction of leaves."""

    # The tree of SGLang's RadixAttention (Zheng et al., 2024, arXiv:2312.07104) with one node per
    # token, in arrays. One thread at a time may call it; README.md describes the protocol.
    def __init__(
        self,
        slots: SlotAllocator,
        host_slots: SlotAllocator | None = None,
        moves: TierCopier | None = None,
        states: Callable[[Nodes], StateCache] | None = None,
    ) -> None:
        self.slots = slots
        self.host_slots = SlotAllocator(0) if host_slots is None else host_slots
        self.nodes = Nodes()
        self.states = StateCache(self.nodes, 0) if states is None else states(self.nodes)
        self.num_recomputed = 0
        self._dropped = np.zeros(_NUM_DROPPED, np.uint64)
        self.num_evicted = self.num_to_host = self.num_to_device = self.num_slot_changes = 0
        self._moves = moves
        self._roots: dict[Hashable, int] = {}
        self._now, self._num_linked = 1, 0
        self._pins: list[int] = []
        self._used: list[Ints] = []  # nodes used since ``new_step``
        self._device, self._host = _Leaves(is_on_device=True), _Leaves(is_on_device=False)

    # ---------------------------------------------------------------- the protocol

    def new_step(self, num_contexts: int = 1) -> None:
        """Begin a batch. Nodes that only earlier batches used may be evicted unless pinned."""
        self._now += 1
        self._used.clear()
        if self.states.num_states:
            self.states.new_step(num_contexts)

    def root(self, namespace: Hashable) -> int:
        """Return the root of a namespace, made on first use."""
        # Each adapter has a namespace: keys and values of equal tokens differ between adapters.
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self.nodes.new_root()
        return root

    def match(self, token_ids: Any, namespace: Hashable = None, hint: CacheHint = NO_HINT) -> int:
        """Return the longest cached prefix's node, not evicted before the next ``new_step``."""
        tokens = np.asarray(token_ids, np.int32)
        sizes = np.array([len(tokens)], np.int32)
        found = self.match_all([hint], namespace, sizes, lambda _, start: tokens[start:])
        self.touch(found)
        return int(found[0])

    def match_all(
        self,
        hints: Sequence[CacheHint],
        namespace: Hashable,
        sizes: Ints,
        tokens_of: Callable[[int, int], Any],
    ) -> Ints:
        """Return the longest cached prefixes' nodes, up to depth ``sizes``; do not touch them."""
        root, depths = self.root(namespace), self.nodes.depth
        nodes = self.nodes.at(hints, root)
        nodes[nodes == 0] = root
        if (depths[nodes] > sizes).any():
            nodes = self.nodes.ancestors(nodes, sizes)
        for i in np.flatnonzero(depths[nodes] < sizes).tolist():
            node = int(nodes[i])
            tokens = np.asarray(tokens_of(i, int(depths[node])), np.int32)
            nodes[i] = self.nodes.walk(node, tokens)
        return nodes

    def touch(self, nodes: Ints) -> None:
        """Mark nodes as used, so that they are not evicted before the next ``new_step``."""
        stamps = self.nodes.stamp
        stamps[nodes] = np.maximum(stamps[nodes], self._now)
        self._used.append(nodes)
        if self.states.num_states:
            self.states.touch(nodes)
        if self.host_slots.num_used:
            for node in nodes[self.nodes.slot[nodes] < 0].tolist():
                path = self.nodes.path(node)
                num_on_device = int((self.nodes.slot[path] > 0).sum())
                # Stamp the path's host nodes, and its last device node, which may be evictable.
                own = path[max(0, num_on_device - 1) :]
                stamps[own] = np.maximum(stamps[own], self._now)

    def allocate(self, count: int, ends: Ints | Sequence[int] = ()) -> Ints | None:
        """Take ``count`` slots, evicting LRU leaves if needed; ``None`` if too few can be freed."""
        # Host nodes on the paths to ``ends`` also move to the device, into additional slots.
        ends = np.asarray(ends, np.int32)
        below = self._host_paths(ends)
        missing = count + len(below) - self.slots.num_free
        # Checked first: an eviction that frees too few slots would only lose cached prefixes.
        if missing > 0 and missing > self._num_evictable(missing):
            return None
        self.nodes.reserve(count)  # or ``append`` might run out of memory, and slots would leak
        if missing > 0:
            self.evict(missing)
        if len(below):
            self._fetch(below)
        return self.slots.allocate(count)

    def append(self, above: Ints | int, tokens: Ints, slots: Ints) -> Ints:
        """Return new nodes, which ``match`` finds only after ``insert``; see ``Nodes.append``."""
        return self.nodes.append(above, tokens, slots, self._now)

    def insert(self, nodes: Ints) -> Ints:
        """Link nodes with filled slots, parents first; return the nodes linked for their tokens."""
        states = self.nodes.state[nodes] if self.states.num_states else None
        # A node already linked for the same token stays; one on the host takes the new slot.
        real, spare = self.nodes.insert(nodes)
        if self.nodes.has_digests:  # count each dropped token that came back, once per drop
            digests = self.nodes.digest[nodes[real == nodes]]
            buckets = _indices_of(digests)
            known = self._dropped[buckets] == digests
            self.num_recomputed += int(np.count_nonzero(known))
            self._dropped[buckets[known]] = 0
        if states is not None:
            self.states.move(np.where(real == nodes, NO_STATE, states), real)
            self.states.touch(real)
        own, of_host = spare[spare > 0], -spare[spare < 0]
        self._num_linked += len(nodes) - len(own)
        self.num_slot_changes += len(of_host)
        self._used.append(real)
        self.slots.free(own)
        self.host_slots.free(of_host)
        return real

    def free(self, nodes: Ints) -> None:
        """Free nodes that were never linked, and their slots."""
        self.slots.free(self.nodes.slot[nodes])
        self.nodes.give_back(nodes)

    def pin(self, node: int) -> None:
        """Keep a device node and its ancestors until ``clear()``."""
        self.nodes.stamp[node] = PINNED
        self._pins.append(node)

    def pinned_with(self, node: int) -> tuple[int, int]:
        """Return how many nodes would be pinned with ``node``, and how many tokens they keep."""
        pins = {*self._pins, node}
        paths = [self.nodes.path(pin) for pin in pins]
        return len(pins), len(np.unique(np.concatenate(paths)))

    def evict(self, count: int) -> int:
        """Free up to ``count`` slots, least recently used first; return how many were freed."""
        # Nodes that are pinned or were used since ``new_step`` stay. Evicted tokens move to free
        # slots on the host, or replace host leaves that were not used since ``new_step``.
        taken = self._device.take_leaves(self.nodes, count, self._now)
        self._num_linked -= len(taken)
        slots = self.nodes.slot[taken]
        try:
            if self.host_slots.num_slots:
                self._demote(taken)
            else:
                self._evict_for_good(taken)
        finally:
            self.slots.free(slots)
        return len(taken)

    def num_cached(
        self, token_ids: Any, namespace: Hashable = None, tier: TierName | None = None
    ) -> int:
        """Return the length of the longest cached prefix, or of its part on one tier."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        node = self.nodes.walk(root, np.asarray(token_ids, np.int32))
        if self.states.num_states:  # tokens after the last state are recomputed
            node = int(self.states.last(np.array([node], np.int32))[0])
        if tier is None:
            return int(self.nodes.depth[node])
        slots = self.nodes.slot[self.nodes.path(node)]
        return int((slots > 0).sum() if tier == "device" else (slots < 0).sum())

    def clear(self) -> None:
        """Unpin and free everything; raise if an allocated slot belongs to no linked node."""
        if self.slots.num_used != self._num_linked:
            raise CacheError("the cache cannot be cleared while slots are being filled")
        slots = self.nodes.slot[: self.nodes.num_made]
        self.slots.free(slots[slots > 0])
        self.host_slots.free(-slots[slots < 0])
        self.states.clear()  # before the nodes: a thread that counts states reads their nodes
        self.nodes.clear()
        self._roots.clear()
        self._pins.clear()
        self._num_linked = 0
        self._dropped[:] = 0
        for leaves in (self._device, self._host):
            leaves.clear()

    # ---------------------------------------------------------------- counting

    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    def _num_evictable(self, enough: int) -> int:
        """Return how many slots ``evict`` can free, or a lower bound of at least ``enough``."""
        depths = self.nodes.depth
        kept = np.concatenate([*self._used, np.array(self._pins, np.int32)])
        num_at_least = self._num_linked - int(depths[kept].sum())
        if num_at_least >= enough:
            return num_at_least
        is_seen = np.zeros(self.nodes.num_made, np.bool_)
        slots = self.nodes.slot
        num_kept = node_loops.count_paths(self.nodes.parent, depths, slots, kept, is_seen)
        return self._num_linked - int(num_kept)

    # ---------------------------------------------------------------- tiers

    def _host_paths(self, ends: Ints) -> Ints:
        """Return the distinct host nodes on the paths to ``ends``, parents first."""
        ends = ends[self.nodes.slot[ends] < 0] if self.host_slots.num_used else ends[:0]
        if not len(ends):
            return ends
        below = np.unique(np.concatenate([self.nodes.path(end) for end in ends.tolist()]))
        below = below[self.nodes.slot[below] < 0]
        return below[np.argsort(self.nodes.depth[below], kind="stable")]

    def _fetch(self, below: Ints) -> None:
        """Move host nodes to device slots; the caller has made sure that enough are free."""
        assert self._moves is not None
        nodes, slots = self.nodes, self.slots.allocate(len(below))
        of_host = -nodes.slot[below]
        try:
            self._moves.to_device(of_host.tolist(), slots.tolist())
        except BaseException:
            self.slots.free(slots)
            raise
        self.num_to_device += len(below)
        self.num_slot_changes += len(below)
        self._num_linked += len(below)
        self.host_slots.free(of_host)
        nodes.slot[below] = slots
        np.add.at(nodes.num_on_device, nodes.parent[below], 1)
        self.touch(below)

    def _demote(self, taken: Ints) -> None:
        """Move nodes evicted from the device to the host; drop those that the host cannot take."""
        assert self._moves is not None
        nodes = self.nodes
        missing = len(taken) - self.host_slots.num_free
        if missing > 0:
            gone = self._host.take_leaves(nodes, missing, self._now)
            self._evict_for_good(gone)
            missing -= len(gone)
        if missing > 0:  # no nodes are below these: evictable host nodes were dropped first
            self._evict_for_good(taken[:missing])
            taken = taken[missing:]
        if not len(taken):
            return
        of_host = self.host_slots.allocate(len(taken))
        try:
            self._moves.to_host(nodes.slot[taken].tolist(), of_host.tolist())
        except BaseException:  # the host slots may be partly written
            self.host_slots.free(of_host)
            self._evict_for_good(self._with_all_below(taken))
            raise
        nodes.slot[taken] = -of_host
        self.num_to_host += len(taken)

    def _evict_for_good(self, taken: Ints) -> None:
        self.num_evicted += len(taken)
        if not self.nodes.has_digests:
            self.nodes.begin_digests()
        digests = self.nodes.digest[taken]
        self._dropped[_indices_of(digests)] = digests
        self.host_slots.free(-self.nodes.slot[taken][self.nodes.slot[taken] < 0])
        self.nodes.unlink(taken)

    def _with_all_below(self, taken: Ints) -> Ints:
        """Return nodes and all host nodes below them, children first."""
        nodes = self.nodes
        is_below = np.zeros(nodes.num_made, np.bool_)
        is_below[taken] = True
        (of_host,) = np.nonzero(nodes.slot[: nodes.num_made] < 0)
        for node in of_host[np.argsort(nodes.depth[of_host], kind="stable")].tolist():
            is_below[node] |= is_below[nodes.parent[node]]
        (found,) = np.nonzero(is_below)
        return found[np.argsort(-nodes.depth[found], kind="stable")].astype(np.int32)


_NUM_DROPPED: Final = 1 << 16
"""Greatest number of dropped tokens whose digests are kept; the digests take 512 KB."""


def _indices_of(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return indices into ``_dropped``; multiplying spreads siblings, whose digests are close."""
    return (digests * node_loops.DIGEST_FACTOR) >> np.uint64(64 - 16)


@final
class _Leaves:
    """The evictable leaves of one tier, in the order of their last use."""

    def __init__(self, *, is_on_device: bool) -> None:
        self._is_on_device = is_on_device
        self.clear()

    def clear(self) -> None:
        self._queue, self._stamps = np.empty(0, np.int32), np.empty(0, np.int64)

    def take_leaves(self, nodes: Nodes, count: int, now: int) -> Ints:
        """Take up to ``count`` nodes that were last used before batch ``now``, leaves first."""
        num_below = nodes.num_on_device if self._is_on_device else nodes.num_children
        taken, num_taken = np.empty(count, np.int32), 0
        while num_taken < count:
            # All leaves are queued at once, so that one scan of all nodes serves many evictions.
            is_new = not len(self._queue)
            if is_new:
                self._fill(nodes, now)
            found, num_done = node_loops.take_leaves(
                nodes.parent,
                nodes.depth,
                nodes.slot,
                nodes.stamp,
                num_below,
                self._queue,
                self._stamps,
                taken[num_taken:],
                self._is_on_device,
            )
            num_taken += found
            self._queue, self._stamps = self._queue[num_done:], self._stamps[num_done:]
            if is_new and not found:
                break
        taken = taken[:num_taken]
        num_below[taken] = 0
        if not self._is_on_device:  # restored, since ``unlink`` subtracts these children again
            np.add.at(nodes.num_children, nodes.parent[taken], 1)
        return taken

    def _fill(self, nodes: Nodes, now: int) -> None:
        size = nodes.num_made
        slots, stamps = nodes.slot[:size], nodes.stamp[:size]
        num_below = nodes.num_on_device if self._is_on_device else nodes.num_children
        is_leaf = (num_below[:size] == 0) & (slots > 0 if self._is_on_device else slots < 0)
        leaves = np.flatnonzero(is_leaf & (stamps < now)).astype(np.int32)
        order = np.argsort(stamps[leaves], kind="stable")
        self._queue, self._stamps = leaves[order], stamps[leaves[order]]
