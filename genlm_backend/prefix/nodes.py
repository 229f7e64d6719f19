"""Nodes: the tokens of a prefix tree, in flat arrays with one element per token."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import CacheError
from genlm_backend.prefix import node_loops

Ints: TypeAlias = NDArray[Any]
"""Integers of 32 or 64 bits in one dimension."""

PINNED: Final = np.iinfo(np.int64).max
"""Stamp of a node that is never evicted."""

CacheHint: TypeAlias = tuple[object, int]
"""A context's node: ``Nodes.key``, which ``clear()`` renews, and a number from ``node_uses``."""

NO_HINT: Final[CacheHint] = (None, 0)
"""The hint of a context whose node is not known."""

_NODE_BITS: Final = 28

_FIELDS: Final[dict[str, type[np.integer[Any]]]] = {
    "parent": np.int32,
    "token": np.int32,
    "depth": np.int32,
    "root": np.int32,
    "slot": np.int32,
    "state": np.int32,
    "first": np.int32,
    "num_children": np.int32,
    "num_on_device": np.int32,
    "stamp": np.int64,
    "num_uses": np.int64,
    "digest": np.uint64,
}


@final
class Nodes:
    """The nodes of a prefix tree by number; a node is *linked* once it is in the child table."""

    # The number of a freed node is reused. A hint to the freed node has an outdated ``num_uses``.
    parent: Ints  # [n] int32
    token: Ints
    depth: Ints
    root: Ints
    slot: Ints
    state: Ints
    first: Ints  # one child; 0 if none, or if it was unlinked and no child has been linked since
    num_children: Ints
    num_on_device: Ints
    stamp: Ints  # [n] int64
    num_uses: Ints  # [n] int64
    digest: NDArray[np.uint64]  # [n] uint64
    table: Ints

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all nodes, and invalidate all hints."""
        self.key = uuid.uuid4().bytes  # unequal to the keys of other processes, too
        # The lowest number never used; 0 means no node. Array elements from this index on are zero.
        self.num_made = 1
        self._free, self._num_free = np.empty(0, np.int32), 0
        for name, dtype in _FIELDS.items():
            setattr(self, name, np.zeros(64, dtype))
        self.table = np.zeros(256, np.int32)
        self.has_digests = False

    def begin_digests(self) -> None:
        """Compute the digest of every node; from now on, ``append`` computes those of new nodes."""
        order = np.argsort(self.depth[: self.num_made], kind="stable").astype(np.int32)
        node_loops.fill_digests(self.digest, self.parent, self.token, self.depth, order)
        self.has_digests = True

    def reserve(self, count: int) -> None:
        """Allocate memory for ``count`` more nodes, so that taking them cannot fail."""
        size = self.num_made + max(0, count - self._num_free)
        old = len(self.parent)
        if size <= old:
            return
        size = max(size, 2 * old)
        if size > 1 << _NODE_BITS:
            raise CacheError(f"{size} tokens are more than a prefix tree can hold")
        arrays = {name: np.zeros(size, dtype) for name, dtype in _FIELDS.items()}
        table = np.zeros(1 << (2 * size - 1).bit_length(), np.int32)
        for name, array in arrays.items():  # replaced only after all allocations have succeeded
            array[:old] = getattr(self, name)
            setattr(self, name, array)
        linked, self.table = self.table[self.table > 0], table
        node_loops.fill_table(self.parent, self.token, self.table, linked)

    # ---------------------------------------------------------------- adding and removing

    def take_nodes(self, count: int) -> Ints:
        """Return the numbers of ``count`` free nodes, which are in use from now on."""
        self.reserve(count)
        reused = min(count, self._num_free)
        self._num_free -= reused
        old = self._free[self._num_free : self._num_free + reused]
        start = self.num_made
        self.num_made += count - reused
        return np.concatenate([old, np.arange(start, self.num_made, dtype=np.int32)])

    def give_back(self, nodes: Ints) -> None:
        """Free nodes that are not linked; hints to them become invalid."""
        if self._num_free + len(nodes) > len(self._free):
            free = np.empty(2 * (self._num_free + len(nodes)), np.int32)
            free[: self._num_free] = self._free[: self._num_free]
            self._free = free
        self._free[self._num_free : self._num_free + len(nodes)] = nodes
        self._num_free += len(nodes)
        for array in (self.first, self.num_children, self.num_on_device, self.slot, self.state):
            array[nodes] = 0
        self.stamp[nodes] = -1
        self.num_uses[nodes] += 1

    def new_root(self) -> int:
        (node,) = self.take_nodes(1)
        self.parent[node] = self.depth[node] = 0
        self.root[node] = self.digest[node] = node
        return int(node)

    def append(self, above: Ints | int, tokens: Ints, slots: Ints, stamp: int) -> Ints:
        """Return new unlinked nodes: one below each node of an array, or a chain below one node."""
        nodes, depths = self.take_nodes(len(tokens)), self.depth[above] + 1
        self.token[nodes], self.root[nodes] = tokens, self.root[above]
        if isinstance(above, int):
            self.parent[nodes[:1]], self.parent[nodes[1:]] = above, nodes[:-1]
            depths = depths + np.arange(len(nodes))
        else:
            self.parent[nodes] = above
        self.depth[nodes], self.slot[nodes], self.stamp[nodes] = depths, slots, stamp
        if self.has_digests:
            node_loops.fill_digests(self.digest, self.parent, self.token, self.depth, nodes)
        return nodes

    def insert(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Link nodes, parents first; return the linked node for each, and the slots left over."""
        # If a child with the same token is linked already, it stays and the new node is freed. A
        # child on the host takes the new node's slot; its host slot is returned, negative.
        real, spare = np.empty_like(nodes), np.empty(len(nodes), np.int32)
        num_spare = node_loops.link(
            self.parent,
            self.token,
            self.first,
            self.num_children,
            self.num_on_device,
            self.stamp,
            self.slot,
            self.table,
            nodes,
            real,
            spare,
        )
        if num_spare:
            self.give_back(nodes[real != nodes])
        return real, spare[:num_spare]

    def unlink(self, nodes: Ints) -> None:
        """Unlink and free nodes, children first; the caller has updated ``num_on_device``."""
        node_loops.unlink(self.parent, self.token, self.first, self.num_children, self.table, nodes)
        self.give_back(nodes)

    # ---------------------------------------------------------------- finding

    def walk(self, node: int, tokens: Ints) -> int:
        """Follow int32 token ids from ``node`` down, while children exist; return the last node."""
        return int(node_loops.walk(self.parent, self.token, self.first, self.table, node, tokens))

    def path(self, node: int) -> Ints:
        """Return the path from the first token's node to ``node``, both included: int32 ``[n]``."""
        found = np.empty(self.depth[node], np.int32)
        node_loops.path(self.parent, self.depth, node, found)
        return found

    def ancestors(self, nodes: Ints, depths: Ints) -> Ints:
        """Return each node's ancestor at its given depth, or the node itself if it is no deeper."""
        found = np.empty_like(nodes)
        node_loops.ancestors(self.parent, self.depth, nodes, depths, found)
        return found

    def cache_hints(self, nodes: Ints) -> Iterable[CacheHint]:
        """Yield a hint for each node; it is valid until the node is freed."""
        return zip(itertools.repeat(self.key), self.node_uses(nodes).tolist())

    def node_uses(self, nodes: Ints) -> Ints:
        """Return for each node a number that no other node and no later use of it has: int64."""
        return (self.num_uses[nodes] << _NODE_BITS) | nodes

    def at(self, hints: Sequence[CacheHint], root: int) -> Ints:
        """Return the nodes of hints, 0 for a hint that is stale or of another root: int32."""
        key = self.key
        node_uses = np.array([hint[1] if hint[0] is key else 0 for hint in hints], np.int64)
        return self.numbered(node_uses, key, root, missing=0)

    def numbered(self, node_uses: Ints, key: object, root: int, missing: int | None = None) -> Ints:
        """Return the nodes of ``node_uses``; ``missing``, by default the root, for stale ones."""
        nodes = (node_uses & ((1 << _NODE_BITS) - 1)).astype(np.int32)
        nodes[nodes >= self.num_made] = 0  # a number from before the tree was cleared
        is_there = self.num_uses[nodes] == node_uses >> _NODE_BITS
        is_there &= (self.root[nodes] == root) & (key == self.key)
        return np.where(is_there, nodes, root if missing is None else missing).astype(np.int32)
