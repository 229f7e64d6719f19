"""Router: estimates, without I/O, which of several replicas will answer a context soonest."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

from genlm_backend.queries.context import common_length

_PER_REPEATED: Final = 4.0
"""Weight of a token that the replica was not sent before, relative to a token in its queue."""
# From a simulation of 10,000 resampled particles on 64 replicas: a smaller weight makes replicas
# compute more tokens again; with a larger one, they wait longer for the slowest replica.


@final
@dataclass(slots=True, eq=False)
class Load:
    """Pending work of a replica: contexts and tokens that wait or are being computed."""

    num_contexts: int = 0
    num_tokens: int = 0
    is_alive: bool = True


@final
@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    replica: int
    num_new: int
    load: Load
    space: Hashable
    packed: bytes


@final
class Router:
    """Assigns each context to the replica with the least estimated cost, counted in tokens."""

    def __init__(
        self, capacities: Sequence[int | None], batch_size: int = 20, per_forward: float = 8.0
    ) -> None:
        self.batch_size, self._per_forward = batch_size, per_forward
        self.loads = [Load() for _ in capacities]
        self._sent = RoutingTree(capacities)

    @property
    def is_alive(self) -> bool:
        return any(load.is_alive for load in self.loads)

    def choose(self, space: Hashable, packed: bytes) -> Choice:
        """Choose a living replica for a context of packed 32-bit ids; a replica must be alive."""
        matches = self._sent.matches(space, packed)
        # A replica's cost is that of its waiting tokens and passes, plus that of the context's
        # unsent tokens. An unsent token counts more, since later contexts wait for it too.
        # Contexts divide the cost of common tokens. So a context goes where its prefix was sent,
        # unless waiting there costs more than the context's share of computing the prefix again.
        costs = [
            (self._wait(load, match) + _PER_REPEATED * match.part, replica)
            for replica, (load, match) in enumerate(zip(self.loads, matches, strict=True))
            if load.is_alive
        ]
        _, replica = min(costs)
        num_new = max(1, len(packed) // 4 - matches[replica].num_known)
        choice = Choice(replica, num_new, self.loads[replica], space, packed)
        choice.load.num_contexts += 1
        choice.load.num_tokens += choice.num_new
        self._sent.add(space, packed, replica)
        return choice

    def _wait(self, load: Load, match: _Match) -> float:
        """Return the cost of waiting for a replica, the context's own queued tokens not counted."""
        num_passes = 1 + load.num_contexts // self.batch_size
        return load.num_tokens - match.num_waiting + self._per_forward * num_passes

    def ended(self, choice: Choice) -> None:
        """Remove a context from its replica's load: it was answered, or no caller waits for it."""
        choice.load.num_contexts -= 1
        choice.load.num_tokens -= choice.num_new
        self._sent.answered(choice.space, choice.packed, choice.replica)

    def lost(self, replica: int) -> None:
        """Mark a replica dead and its cache empty."""
        self.loads[replica] = Load(is_alive=False)
        self._sent.evict(replica, 0)

    def back(self, replica: int) -> None:
        self.loads[replica].is_alive = True

    def sent_to_all(self, space: Hashable, packed: bytes) -> None:
        for replica, load in enumerate(self.loads):
            if load.is_alive:
                self._sent.add(space, packed, replica)
                self._sent.answered(space, packed, replica)

    def cleared(self) -> None:
        self._sent.clear()


_ID_BYTES: Final = 4
_KEPT: Final = 0.8
"""Share of a replica's capacity that the newest tokens keep once all tokens exceed it."""


@final
@dataclass(slots=True, eq=False)
class _Node:
    """A node of the radix tree; its label is the tokens after its parent's."""

    label: bytes
    parent: _Node | None
    stamps: dict[int, int]
    waiting: set[int]
    children: dict[bytes, _Node] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.label) // _ID_BYTES

    @property
    def key(self) -> bytes:
        return self.label[:_ID_BYTES]


class _Match(NamedTuple):
    """Numbers of a context's tokens: sent to a replica, waiting there, and not sent (a share)."""

    num_known: int
    num_waiting: int
    part: float


@final
class RoutingTree:
    """A radix tree of contexts that records the replicas to which each was sent."""

    def __init__(self, capacities: Sequence[int | None]) -> None:
        self._capacities = list(capacities)
        self._roots: dict[Hashable, _Node] = {}
        self._clock = itertools.count(1)
        self.num_tokens = [0] * len(self._capacities)

    def matches(self, space: Hashable, packed: bytes) -> list[_Match]:
        path = list(self._path(space, packed))
        end = sum(matched for _, matched in path)
        parts = [(len(packed) - end) / _ID_BYTES]  # shares of tokens after each node, last first
        num_ways = 1
        for node, matched in reversed(path):
            num_ways = max(num_ways, len(node.children))
            parts.append(parts[-1] + matched / _ID_BYTES / num_ways)
        parts.reverse()
        found = [_Match(0, 0, parts[0])] * len(self._capacities)
        for (node, matched), part in zip(path, parts[1:], strict=True):
            own = matched // _ID_BYTES
            for replica in node.stamps:
                known, waiting, _ = found[replica]
                waiting += own if replica in node.waiting else 0
                found[replica] = _Match(known + own, waiting, part)
        return found

    def _path(self, space: Hashable, packed: bytes) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes along a context, and how many bytes of each label match."""
        node, depth = self._roots.get(space), 0
        while node is not None and depth < len(packed):
            node = node.children.get(packed[depth : depth + _ID_BYTES])
            if node is None:
                return
            matched = _matched(node.label, packed, depth)
            yield node, matched
            if matched < len(node.label):
                return
            depth += matched

    def add(self, space: Hashable, packed: bytes, replica: int) -> None:
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
            self.evict(replica, int(capacity * _KEPT))

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
        for node, _ in self._path(space, packed):
            node.waiting.discard(replica)

    # ---------------------------------------------------------------- forgetting

    def clear(self) -> None:
        self._roots.clear()
        self.num_tokens = [0] * len(self._capacities)

    def evict(self, replica: int, limit: int) -> None:
        """Forget a replica's least recently sent contexts down to ``limit`` tokens."""
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        for node in nodes:  # the list grows: parents precede their children
            nodes += node.children.values()
        own = [node for node in reversed(nodes) if replica in node.stamps]
        for node in sorted(own, key=lambda node: node.stamps[replica]):
            if self.num_tokens[replica] <= limit:
                return
            del node.stamps[replica]
            node.waiting.discard(replica)
            self.num_tokens[replica] -= node.num_tokens
            if not node.stamps and node.parent is not None:
                del node.parent.children[node.key]


def _matched(label: bytes, packed: bytes, depth: int) -> int:
    """Return how many bytes of a label, in whole tokens, match a context from ``depth`` on."""
    if packed.startswith(label, depth):
        return len(label)
    common = common_length(label, packed[depth : depth + len(label)])
    return common - common % _ID_BYTES


def _split(node: _Node, matched: int) -> _Node:
    """Split a node's label after ``matched`` bytes; return the new node, with the first part."""
    parent = node.parent
    assert parent is not None
    first = _Node(node.label[:matched], parent, dict(node.stamps), set(node.waiting))
    parent.children[first.key] = first
    node.label, node.parent = node.label[matched:], first
    first.children[node.key] = node
    return first
