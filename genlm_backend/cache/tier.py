"""Tier: the slots of one memory, and which nodes can be evicted from there."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, final, get_args

from genlm_backend.checks import Check, one_of

if TYPE_CHECKING:
    from genlm_backend.cache.node import Node
    from genlm_backend.cache.slots import Slots

TierName: TypeAlias = Literal["device", "host"]
"""Name of a memory that keys and values are kept in."""

check_tier: Final[Check[TierName | None]] = one_of(None, *get_args(TierName))
"""Check of an argument that names a tier, or none."""


@final
class Tier:
    """One of the memories that the nodes of a prefix tree have their slots in.

    Args:
        name: Its name.
        slots: Its slots.

    Attributes:
        name: As given.
        slots: As given.
    """

    def __init__(self, name: TierName, slots: Slots) -> None:
        self.name = name
        self.slots = slots
        self._ties = itertools.count()
        # Leaves nobody locks, oldest first. An entry that its node has outlived (used since,
        # grown children, gone) stays until it is popped or until the dead outnumber the living.
        self._leaves: list[tuple[int, int, Node]] = []

    def is_evictable(self, node: Node) -> bool:
        """Return whether a node's tokens can leave this memory now, the last of them first."""
        is_leaf = node.tier is self and not (node.num_below or node.num_locks)
        return is_leaf and node.parent is not None

    def offer(self, node: Node, num_nodes: int, nodes: Iterable[Node]) -> None:
        """Note that a node can be evicted, if that is so.

        Args:
            node: The node.
            num_nodes: Number of nodes of the tree.
            nodes: All of them, which are looked through where too many entries are dead.
        """
        if not self.is_evictable(node):
            return
        heapq.heappush(self._leaves, (node.last_used, next(self._ties), node))
        if len(self._leaves) > 64 + 4 * num_nodes:
            self._leaves = [
                (leaf.last_used, next(self._ties), leaf)
                for leaf in nodes
                if self.is_evictable(leaf)
            ]
            heapq.heapify(self._leaves)

    def pop(self) -> Node | None:
        """Return the node that was used least recently of those that can be evicted."""
        while self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            if stamp == node.last_used and self.is_evictable(node):
                return node
        return None

    def offered(self) -> set[Node]:
        """Return the nodes that ``pop`` may return."""
        return {node for stamp, _, node in self._leaves if stamp == node.last_used}

    def clear(self) -> None:
        """Forget which nodes there are."""
        self._leaves.clear()
