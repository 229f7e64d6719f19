"""Running states: what layers of state-space models keep behind a token in the place of all keys.

Such a layer has one state behind each token, made of the one before, and no part of it belongs to a
token. So a node of a prefix tree may have a *state*: a snapshot of every such layer behind its
token. What goes on from a context needs the state behind its last token, and that alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.cache import node_loops
from genlm_backend.cache.nodes import Ints, Nodes
from genlm_backend.errors import CacheError

NO_STATE: Final = 0
"""The number that stands for no state: of a context that begins, or that is not kept."""


@final
@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the running state behind one token.

    Attributes:
        layer: Index of the layer of the model's cache that it is in.
        name: Name of the attribute there, a dictionary of tensors.
        index: Key of the tensor in that dictionary.
        shape: Its shape, without the axis of rows.
        dtype: Type of its elements.
        device: Device that it is on.
    """

    layer: int
    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Number of bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize


class CacheLayer(NamedTuple):
    """What one layer of a model's cache holds; nothing is possible too.

    Attributes:
        attends: Whether it holds keys and values.
        num_states: Number of running states that it may hold.
    """

    attends: bool
    num_states: int


@final
@dataclass(frozen=True, slots=True)
class StateLayout:
    """The running states of all layers; none where a model has no such layer.

    Attributes:
        tensors: Their tensors, layer by layer.
        layers: What each layer of the model's cache holds.
    """

    tensors: tuple[StateTensor, ...] = ()
    layers: tuple[CacheLayer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def bytes_per_state(self) -> int:
        """Number of bytes of the state behind one token."""
        return sum(tensor.nbytes for tensor in self.tensors)


@final
class StateStore:
    """Preallocated running states, by number; the first stands for none.

    Args:
        layout: Their tensors.
        num_states: Number of states, beside the one that stands for none.

    Attributes:
        layout: As given.
        num_states: As given.
    """

    def __init__(self, layout: StateLayout, num_states: int) -> None:
        self.layout, self.num_states = layout, num_states
        self._tensors = [
            torch.empty((num_states + 1, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            for tensor in layout.tensors
        ]

    def read(self, numbers: Ints) -> list[torch.Tensor]:
        """Return copies of states, ``[n, *shape]`` each, in the order of the layout."""
        index = torch.as_tensor(numbers, dtype=torch.int64)
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in self._tensors]

    def write(
        self, numbers: Ints, states: Sequence[torch.Tensor], rows: Ints | None = None
    ) -> None:
        """Fill states with rows of tensors as ``read`` returns them.

        Args:
            numbers: The states: ``[n]``.
            states: The tensors, ``[B, *shape]`` each.
            rows: Indices of the rows that go there: ``[n]``; ``None`` for all in order.
        """
        index = torch.as_tensor(numbers, dtype=torch.int64)
        picked = None if rows is None else torch.as_tensor(rows, dtype=torch.int64)
        for tensor, given in zip(self._tensors, states, strict=True):
            new = given if picked is None else given.index_select(0, picked.to(given.device))
            tensor.index_copy_(0, index.to(tensor.device), new.to(tensor.device, tensor.dtype))

    def is_finite(self, numbers: Ints) -> bool:
        """Return whether nothing in these states is infinite or NaN."""
        return all(bool(tensor.isfinite().all()) for tensor in self.read(numbers))


@final
class States:
    """Which nodes of a prefix tree have a running state; the oldest go first; a fixed budget.

    A node's state goes with the node. Of states that were last used at one time, those go first
    that are the fewest tokens behind another one.

    Args:
        nodes: The nodes of the tree.
        num_states: Number of states that there are.

    Attributes:
        num_states: As given.
        num_evicted: Number of states that had to go for others so far.
    """

    def __init__(self, nodes: Nodes, num_states: int) -> None:
        self._nodes, self.num_states = nodes, num_states
        self.num_evicted = 0
        self.clear()

    def clear(self) -> None:
        """Forget all states, pinned ones too."""
        size = self.num_states + 1
        self._node = np.zeros(size, np.int32)  # which has had it last
        self._stamp = np.zeros(size, np.int64)  # batch of its last use
        self._given = np.zeros(size, np.int64)  # batch that it was given in
        self._num_held = np.zeros(size, np.int32)
        self._is_pinned = np.zeros(size, np.bool_)
        self._now = 1

    # ---------------------------------------------------------------- reading

    @property
    def num_used(self) -> int:
        """Number of states that nodes have."""
        return int(self._is_used().sum())

    def _is_used(self) -> NDArray[np.bool_]:
        is_used = self._nodes.state[self._node] == np.arange(self.num_states + 1)
        is_used[NO_STATE] = False
        return is_used

    def last(self, nodes: Ints) -> Ints:
        """Return the last node with a state on the path to each node, or its root: int32."""
        found = np.empty_like(nodes)
        node_loops.last_states(
            self._nodes.parent, self._nodes.depth, self._nodes.state, nodes, found
        )
        return found

    # ---------------------------------------------------------------- a batch

    def begin(self) -> None:
        """Begin a batch: what earlier ones hold is held no more."""
        self._now += 1
        self._num_held[:] = 0

    def use(self, nodes: Ints) -> None:
        """Note that nodes, and the states that they may have, are used in this batch."""
        self._stamp[self._nodes.state[nodes]] = self._now

    def hold(self, nodes: Ints) -> None:
        """Keep the states of nodes, if they have any, until they are released as often."""
        np.add.at(self._num_held, self._nodes.state[nodes], 1)

    def release(self, nodes: Ints) -> None:
        """Undo ``hold``."""
        np.subtract.at(self._num_held, self._nodes.state[nodes], 1)

    def has_room(self, count: int, nodes: Ints) -> bool:
        """Return whether so many states could be given while those of some nodes stay."""
        is_kept = self._is_used() & self._is_pinned
        is_kept[self._nodes.state[nodes]] = True
        is_kept[NO_STATE] = False
        return count <= self.num_states - int(is_kept.sum())

    def give(self, nodes: Ints, num_needed: Ints) -> Ints:
        """Return numbers of states for nodes that have none; 0 where there is no room.

        What is held and what is pinned stays, and for a state that is not needed also what was
        given in this batch.

        Args:
            nodes: The nodes, each once: int32 ``[n]``.
            num_needed: How often each is held from now on: ``[n]``. These are served first.
        """
        nodes_of, numbers = self._nodes, np.zeros(len(nodes), np.int64)
        asked = np.flatnonzero(nodes_of.state[nodes] == NO_STATE)
        asked = asked[np.argsort(-num_needed[asked], kind="stable")]
        free = self._taken(len(asked), int((num_needed[asked] > 0).sum()))
        asked = asked[: len(free)]
        own = nodes[asked]
        numbers[asked] = free
        nodes_of.state[own], self._node[free] = free, own
        self._stamp[free] = self._given[free] = self._now
        self._is_pinned[free] = False
        self._num_held[free] = num_needed[asked]
        return numbers

    def _taken(self, count: int, num_needed: int) -> Ints:
        """Return up to ``count`` free states: old ones go for them, new ones if they are needed."""
        is_used = self._is_used()
        (free,) = np.nonzero(~is_used[1:])
        free = free[:count] + 1
        missing = count - len(free)
        if missing <= 0:
            return free
        can_go = is_used & (self._num_held <= 0) & ~self._is_pinned
        is_new = self._given == self._now
        gone = self._cheapest(np.flatnonzero(can_go & ~is_new), missing)
        missing = num_needed - len(free) - len(gone)
        if missing > 0:
            newer = self._cheapest(np.flatnonzero(can_go & is_new), missing)
            gone = np.concatenate([gone, newer])
        self._nodes.state[self._node[gone]] = NO_STATE
        self.num_evicted += len(gone)
        return np.concatenate([free, gone])

    def _cheapest(self, numbers: Ints, count: int) -> Ints:
        """Return the ``count`` oldest of some states, the cheapest to compute again first."""
        if len(numbers) <= count:
            return numbers
        nodes, depths = self._node[numbers], self._nodes.depth
        num_tokens = depths[nodes] - depths[self.last(self._nodes.parent[nodes])]
        return numbers[np.lexsort((num_tokens, self._stamp[numbers]))[:count]]

    # ---------------------------------------------------------------- beside batches

    def pin(self, node: int) -> bool:
        """Keep a node's state until ``clear()``, if it has one and others have room."""
        number = self._nodes.state[node]
        others = self._is_pinned.copy()
        others[number] = True
        if number == NO_STATE or int((others & self._is_used()).sum()) >= self.num_states:
            return False
        self._is_pinned[number] = True
        return True

    def move(self, numbers: Ints, nodes: Ints) -> None:
        """Give states to nodes that stand for those that had them, where they have none.

        Args:
            numbers: The states, 0 for none: ``[n]``.
            nodes: The node that each is behind now: int32 ``[n]``.
        """
        (wanted,) = np.nonzero((numbers != NO_STATE) & (self._nodes.state[nodes] == NO_STATE))
        for i in wanted.tolist():
            self._nodes.state[nodes[i]], self._node[numbers[i]] = numbers[i], nodes[i]

    def check(self, linked: Ints) -> None:
        """Compare what nodes and states say of each other.

        Args:
            linked: All nodes that can be found.

        Raises:
            CacheError: If something is wrong.
        """
        states = self._nodes.state[linked]
        own = states[states != NO_STATE]
        if len(np.unique(own)) != len(own):
            raise CacheError("two nodes have one state")
        if (self._node[states[states != NO_STATE]] != linked[states != NO_STATE]).any():
            raise CacheError("a state is another node's")
        if len(own) != self.num_used:
            raise CacheError(f"{self.num_used} states are used, and {len(own)} can be found")
