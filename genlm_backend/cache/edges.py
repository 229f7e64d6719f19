"""Edges: the nodes of a prefix tree, and how they come, part and go."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Hashable, Iterator
from typing import final

from genlm_backend.cache.node import Node
from genlm_backend.cache.tier import Tier
from genlm_backend.common_prefix import common_length


@final
class Edges:
    """The nodes of a prefix tree; knows no matches.

    Args:
        tier: Where the slots of new nodes are.

    Attributes:
        num_nodes: Number of nodes, roots not counted.
    """

    def __init__(self, tier: Tier) -> None:
        self.num_nodes = 0
        self._tier = tier
        self._roots: dict[Hashable, Node] = {}
        self._clock = itertools.count(1)

    def root(self, namespace: Hashable) -> Node:
        """Return the root of a namespace, which is made where it is not there."""
        root = self._roots.get(namespace)
        if root is None:
            root = Node(None, array("i"), array("q"), self._tier)
            self._roots[namespace] = root
        return root

    def find(self, namespace: Hashable) -> Node | None:
        """Return the root of a namespace if it is there."""
        return self._roots.get(namespace)

    def __iter__(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from root.subtree()

    def clear(self) -> None:
        """Free all slots and forget all nodes."""
        for node in self:
            node.tier.slots.free(node.slots)
        self._roots.clear()
        self.num_nodes = 0

    def walk(self, node: Node, tokens: array[int], num_left: int = 0) -> tuple[Node, int]:
        """Follow ``tokens``, splitting the last edge; return where that ends and how far it is.

        Args:
            node: Where to begin.
            tokens: What to follow.
            num_left: How many tokens before the end of ``node`` to begin.
        """
        done = 0
        while True:
            if num_left:
                size = len(node.tokens)
                edge = node.tokens if num_left == size else node.tokens[size - num_left :]
                if edge != tokens[done : done + num_left]:
                    shared = common_length(edge, tokens[done:])
                    return self.split(node, size - num_left + shared), done + shared
                done += num_left
            child = node.children.get(tokens[done]) if done < len(tokens) else None
            if child is None:
                return node, done
            node, num_left = child, len(child.tokens)

    def split(self, node: Node, size: int) -> Node:
        """Give the first ``size`` tokens of ``node`` to a new parent of it; return that."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.tokens[:size], node.slots[:size], node.tier)
        upper.num_locks, upper.last_used = node.num_locks, node.last_used
        parent.children[upper.tokens[0]] = upper
        del node.tokens[:size], node.slots[:size]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        upper.num_below = 1
        self.num_nodes += 1
        return upper

    def grow(self, end: Node, tokens: array[int], slots: array[int]) -> Node:
        """Return a new node below ``end``."""
        child = end.children[tokens[0]] = Node(end, tokens, slots, self._tier)
        end.num_below += 1
        self.num_nodes += 1
        return child

    def shorten(self, leaf: Node, count: int) -> None:
        """Free the last ``count`` slots of an unlocked node without children.

        With the last of them goes the node.
        """
        start, parent = len(leaf.slots) - count, leaf.parent
        if not start:
            self.drop(leaf)
            return
        assert parent is not None
        leaf.tier.slots.free(leaf.slots[start:])
        shorter = Node(parent, leaf.tokens, leaf.slots, leaf.tier)
        del shorter.tokens[start:], shorter.slots[start:]
        shorter.last_used = leaf.last_used
        parent.children[shorter.tokens[0]] = shorter
        leaf.parent = None  # whoever remembers it looks elsewhere
        self.offer(shorter)

    def drop(self, node: Node) -> int:
        """Free an unlocked node with all that is below it, if it is there; return the tokens."""
        parent, num_tokens = node.parent, 0
        if parent is None:
            return 0
        del parent.children[node.tokens[0]]
        parent.num_below -= node.tier is parent.tier
        for lower in node.subtree():
            lower.tier.slots.free(lower.slots)
            num_tokens += len(lower.tokens)
            lower.parent = None
            self.num_nodes -= 1
        self.offer(parent)
        return num_tokens

    def touch(self, node: Node, num_locks: int) -> None:
        """Add locks to a node and all above it, which have been used now."""
        stamp, part = next(self._clock), node
        while part is not None:
            part.num_locks += num_locks
            part.last_used = stamp
            part = part.parent

    def offer(self, node: Node) -> None:
        """Note that a node can be evicted from its tier, if that is so."""
        node.tier.offer(node, self.num_nodes, self)
