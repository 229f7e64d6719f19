"""SentTree: which tokens each of several replicas was sent, and so may have keys and values of."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple, final

from genlm_backend.common_prefix import common_length

_ID_BYTES: Final = 4
_KEPT: Final = 0.8
"""Part of a replica's tokens that stays when there have become too many."""


@final
class _Node:
    """A node of the radix tree; its label is the tokens behind those of its parent."""

    __slots__ = ("children", "label", "parent", "stamps", "waiting")

    def __init__(
        self, label: bytes, parent: _Node | None, stamps: dict[int, int], waiting: set[int]
    ) -> None:
        self.label, self.parent, self.stamps, self.waiting = label, parent, stamps, waiting
        self.children: dict[bytes, _Node] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.label) // _ID_BYTES

    @property
    def key(self) -> bytes:
        return self.label[:_ID_BYTES]


class _PathNode(NamedTuple):
    """A node on the path of a context."""

    node: _Node
    start: int
    matched: int


class Match(NamedTuple):
    """The part of a context that a replica was sent."""

    num_known: int
    num_waiting: int
    part: float


@final
class SentTree:
    """A radix tree of contexts, with the replicas that each was sent to.

    It is an estimate: what a replica has evicted by itself is not known here.
    """

    def __init__(self, capacities: Sequence[int | None]) -> None:
        self._capacities = list(capacities)
        self._roots: dict[Hashable, _Node] = {}
        self._clock = itertools.count(1)
        self.num_tokens = [0] * len(self._capacities)

    def matches(self, space: Hashable, packed: bytes) -> list[Match]:
        """Return the part of a context that each replica was sent."""
        path = list(self._path(space, packed))
        end = path[-1].start + path[-1].matched if path else 0
        parts = [(len(packed) - end) / _ID_BYTES]  # of what follows each node, from the last one
        num_ways = 1
        for step in reversed(path):
            num_ways = max(num_ways, len(step.node.children))
            parts.append(parts[-1] + step.matched / _ID_BYTES / num_ways)
        parts.reverse()
        found = [Match(0, 0, parts[0])] * len(self._capacities)
        for step, part in zip(path, parts[1:], strict=True):
            own = step.matched // _ID_BYTES
            for replica in step.node.stamps:
                known, waiting, _ = found[replica]
                waiting += own if replica in step.node.waiting else 0
                found[replica] = Match(known + own, waiting, part)
        return found

    def _path(self, space: Hashable, packed: bytes) -> Iterable[_PathNode]:
        """Yield the nodes that begin as a context goes on."""
        node, depth = self._roots.get(space), 0
        while node is not None and depth < len(packed):
            node = node.children.get(packed[depth : depth + _ID_BYTES])
            if node is None:
                return
            matched = _matched(node.label, packed, depth)
            yield _PathNode(node, depth, matched)
            if matched < len(node.label):
                return
            depth += matched

    def add(self, space: Hashable, packed: bytes, replica: int) -> None:
        """Remember that a replica was sent a context."""
        stamp, depth = next(self._clock), 0
        node = self._roots.setdefault(space, _Node(b"", None, {}, set()))
        while depth < len(packed):
            child = node.children.get(packed[depth : depth + _ID_BYTES])
            if child is None:
                self._append(node, packed[depth:], replica, stamp)
                break
            matched = _matched(child.label, packed, depth)
            if matched < len(child.label):
                child = _split(child, matched)
            self._mark(child, replica, stamp)
            node, depth = child, depth + matched
        capacity = self._capacities[replica]
        if capacity is not None and self.num_tokens[replica] > capacity:
            self._evict(replica, int(capacity * _KEPT))

    def _append(self, node: _Node, label: bytes, replica: int, stamp: int) -> None:
        if node.parent is not None and not node.children and set(node.stamps) == {replica}:
            node.label += label
            node.waiting.add(replica)
        else:
            node.children[label[:_ID_BYTES]] = _Node(label, node, {replica: stamp}, {replica})
        self.num_tokens[replica] += len(label) // _ID_BYTES

    def _mark(self, node: _Node, replica: int, stamp: int) -> None:
        if replica not in node.stamps:
            self.num_tokens[replica] += node.num_tokens
            node.waiting.add(replica)
        node.stamps[replica] = stamp

    def answered(self, space: Hashable, packed: bytes, replica: int) -> None:
        """Take note that a replica has computed a context."""
        for step in self._path(space, packed):
            step.node.waiting.discard(replica)

    # ---------------------------------------------------------------- forgetting

    def forget(self, replica: int) -> None:
        """Forget what a replica was sent."""
        self._evict(replica, 0)

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self.num_tokens = [0] * len(self._capacities)

    def _evict(self, replica: int, limit: int) -> None:
        """Forget the ends of contexts that a replica was sent longest ago, down to a limit."""
        num_behind = self._num_behind(replica)
        ends = [(node.stamps[replica], id(node), node) for node, n in num_behind.items() if not n]
        heapq.heapify(ends)
        while ends and self.num_tokens[replica] > limit:
            *_, node = heapq.heappop(ends)
            parent = node.parent
            assert parent is not None
            del node.stamps[replica]
            node.waiting.discard(replica)
            self.num_tokens[replica] -= node.num_tokens
            if not node.stamps:
                del parent.children[node.key]
            if parent in num_behind:
                num_behind[parent] -= 1
                if not num_behind[parent]:
                    heapq.heappush(ends, (parent.stamps[replica], id(parent), parent))

    def _num_behind(self, replica: int) -> dict[_Node, int]:
        """Return, of each node that a replica was sent, how many of those behind it it was sent."""
        found: dict[_Node, int] = {}
        left = [child for root in self._roots.values() for child in root.children.values()]
        while left:
            node = left.pop()
            if replica in node.stamps:
                own = [child for child in node.children.values() if replica in child.stamps]
                found[node] = len(own)
                left.extend(own)
        return found


def _matched(label: bytes, packed: bytes, depth: int) -> int:
    """Return how many bytes of whole tokens a label shares with a context from a depth on."""
    if packed.startswith(label, depth):
        return len(label)
    common = common_length(label, packed[depth : depth + len(label)])
    return common - common % _ID_BYTES


def _split(node: _Node, matched: int) -> _Node:
    """Part a node in two; return the first, which stands for it now."""
    parent = node.parent
    assert parent is not None
    first = _Node(node.label[:matched], parent, dict(node.stamps), set(node.waiting))
    parent.children[first.key] = first
    node.label, node.parent = node.label[matched:], first
    first.children[node.key] = node
    return first
