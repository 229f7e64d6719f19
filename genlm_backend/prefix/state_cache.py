"""Recurrent states, which layers of state-space models keep instead of keys and values.

Such a layer computes the state after each token from the state before it; no part of a state
belongs to one token. So a node of a prefix tree may have a *state*: a snapshot of all such layers
after its token. To continue a context, these layers need only the state after its last token.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.prefix import node_loops
from genlm_backend.prefix.nodes import Ints, Nodes
from genlm_backend.prefix.tier_copier import TierCopier

_FEWEST_TO_MOVE: Final = 32  # a guess
"""Least distance in tokens to the previous state for an evicted state to move to the host; a state
at a context's end moves at any distance."""

_NUM_RECENT: Final = 4
"""Batches per step of all particles, a guess; the next step needs the latest states last."""

_LONG_AGO: Final = 1 << 40
"""More batches than a process will run."""

NO_STATE: Final = 0
"""The number that means "no state": of a root, or of a node whose state is not stored."""


@final
@dataclass(frozen=True, slots=True)
class StateTensor:
    """The layout of one tensor of a recurrent state: element ``index`` of a layer's ``name``."""

    layer: int
    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CacheLayer(NamedTuple):
    """What one cache layer contains: keys and values (``attends``), states, both or neither."""

    attends: bool
    num_states: int

    @property
    def is_empty(self) -> bool:
        """Whether the layer holds nothing, for example because it reads another layer's cache."""
        return not self.attends and not self.num_states


@final
@dataclass(frozen=True, slots=True)
class StateLayout:
    """The recurrent state tensors, and what each cache layer contains; false without any tensor."""

    tensors: tuple[StateTensor, ...] = ()
    layers: tuple[CacheLayer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def bytes_per_state(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def on_host(self) -> Self:
        host = torch.device("cpu")
        return replace(self, tensors=tuple(replace(each, device=host) for each in self.tensors))


@final
class StatePool:
    """Preallocated recurrent states, numbered from 1."""

    def __init__(self, layout: StateLayout, num_states: int, pins: bool = False) -> None:
        self.layout, self.num_states = layout, num_states
        self._tensors = [
            torch.empty(
                (num_states, *tensor.shape),
                dtype=tensor.dtype,
                device=tensor.device,
                pin_memory=pins and tensor.device.type == "cpu",
            )
            for tensor in layout.tensors
        ]
        self.codes = [tuple(self._tensors)]

    def read(self, numbers: Ints) -> list[torch.Tensor]:
        """Return copies of states: ``[n, *shape]`` for each tensor of the layout, in its order."""
        index = torch.as_tensor(numbers, dtype=torch.int64) - 1
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in self._tensors]

    def write(self, numbers: Ints, states: Sequence[torch.Tensor]) -> None:
        """Fill states with tensors in the form that ``read`` returns."""
        index = torch.as_tensor(numbers, dtype=torch.int64) - 1
        is_stretch = len(numbers) > 0 and bool((np.diff(numbers) == 1).all())
        for tensor, new in zip(self._tensors, states, strict=True):
            if is_stretch:  # consecutive, as in most steps: a slice copy is twice as fast
                tensor[int(numbers[0]) - 1 : int(numbers[-1])] = new
            else:
                tensor.index_copy_(0, index.to(tensor.device), new.to(tensor.device, tensor.dtype))

    def is_finite(self, numbers: Ints) -> bool:
        """Return whether all elements of the states with these numbers are finite."""
        return all(bool(tensor.isfinite().all()) for tensor in self.read(numbers))


@final
class StateCache:
    """Assigns recurrent states, by number, to nodes, and evicts them."""

    def __init__(
        self, nodes: Nodes, num_states: int, num_on_host: int = 0, moves: TierCopier | None = None
    ) -> None:
        self._nodes, self.num_states = nodes, num_states
        self.host, self._moves = HostStateCache(nodes, num_on_host), moves
        self.num_evicted = self.num_to_host = self.num_to_device = 0
        self.clear()

    def clear(self) -> None:
        """Forget all states, pinned ones too."""
        size = self.num_states + 1
        self._owner = np.zeros(size, np.int32)  # the node that had the state last
        self._stamp = np.zeros(size, np.int64)  # the batch that used the state last
        self._num_rows = np.zeros(size, np.int32)  # rows of this batch that continue from the state
        self._num_held = np.zeros(size, np.int32)  # holds that have not been released
        self._is_pinned = np.zeros(size, np.bool_)
        self._now = self._num_contexts = 1
        self._free = np.arange(1, size)
        self._num_handed_out = 0
        self.host.clear()

    # ---------------------------------------------------------------- reading

    @property
    def num_used(self) -> int:
        return int(self._is_used().sum())

    def _is_used(self) -> NDArray[np.bool_]:
        # Read before ``state``: if ``state`` is replaced by a larger array, that has all owners.
        owner = self._owner
        is_used = self._nodes.state[owner] == np.arange(self.num_states + 1)
        is_used[NO_STATE] = False
        return is_used

    def last(self, nodes: Ints) -> Ints:
        """Return each node's nearest node with a state, at or above it, else its root: int32."""
        found = np.empty_like(nodes)
        node_loops.last_states(
            self._nodes.parent, self._nodes.depth, self._nodes.state, nodes, found
        )
        return found

    # ---------------------------------------------------------------- a batch

    def new_step(self, num_contexts: int) -> None:
        """Begin a batch of ``num_contexts`` contexts; end every ``hold`` of earlier batches."""
        self._now, self._num_contexts = self._now + 1, num_contexts
        self._num_held[:] = self._num_rows[:] = 0

    def touch(self, nodes: Ints) -> None:
        """Mark the states of nodes, if they have any, as used in this batch."""
        self._stamp[self._numbers(nodes)] = self._now
        if self.host.num_states:
            self.host.touch(nodes, self._now)

    def _numbers(self, nodes: Ints) -> Ints:
        """Return the numbers of nodes' device states; ``NO_STATE`` for a node without one."""
        return np.maximum(self._nodes.state[nodes], NO_STATE)

    def hold(self, nodes: Ints) -> None:
        """Protect nodes' device states, if any, from eviction until ``release`` or a new batch."""
        np.add.at(self._num_held, self._numbers(nodes), 1)

    def release(self, nodes: Ints) -> None:
        np.subtract.at(self._num_held, self._numbers(nodes), 1)

    def fetch(self, nodes: Ints) -> bool:
        """Move nodes' host states to the device, all or none; return whether there was room."""
        state = self._nodes.state
        wanted = np.unique(nodes[state[nodes] < 0])
        if not len(wanted):
            return True
        is_kept = self._is_used() & (self._is_pinned | (self._num_held > 0))
        is_kept[self._numbers(nodes)] = True
        is_kept[NO_STATE] = False
        if self._moves is None or len(wanted) > self.num_states - int(is_kept.sum()):
            return False
        self.touch(wanted)  # or states that are evicted to the host could replace these
        others = np.setdiff1d(nodes, wanted)
        self.hold(others)
        try:
            numbers = self._taken(len(wanted), len(wanted))
            self._moves.to_device((-state[wanted]).tolist(), numbers.tolist())
        finally:
            self.release(others)
        self._assign(numbers, wanted)
        self.num_to_device += len(wanted)
        return True

    def go_on_from(self, nodes: Ints) -> None:
        """Record that one row continues from each node, before the rows' new nodes are linked."""
        numbers = self._numbers(nodes)
        np.add.at(self._num_rows, numbers, 1)
        # A state at a context's end is the first to evict if just one row continues from it.
        is_left = (self._nodes.num_children[nodes] == 0) & (self._num_rows[numbers] == 1)
        self._stamp[numbers[is_left]] = self._now - _LONG_AGO

    def give(self, nodes: Ints, num_needed: Ints) -> Ints:
        """Give new states to nodes without a device state; return each node's new number, or 0."""
        # Host numbers are negative. A device state begins as if held ``num_needed`` times.
        numbers = np.zeros(len(nodes), np.int64)
        asked = np.flatnonzero(self._nodes.state[nodes] <= 0)
        is_needed = num_needed[asked] > 0
        # Needed states come first; of equally needed ones, those after a shared state come last.
        before = self._numbers(self.last(self._nodes.parent[nodes]))
        is_near = (before > NO_STATE) & (self._num_rows[before] > 1)
        asked = asked[np.lexsort((is_near[asked], ~is_needed))]
        free = self._taken(len(asked), int(is_needed.sum()))
        asked, rest = asked[: len(free)], asked[len(free) :]
        numbers[asked] = free
        self._assign(free, nodes[asked])
        self._num_held[free] = num_needed[asked]
        if self.host.num_states and len(rest):
            rest = rest[(num_needed[rest] == 0) & (self._nodes.state[nodes[rest]] == NO_STATE)]
            on_host, num_evicted = self.host.assign(nodes[rest[::-1]], self._now, self._now)
            self.num_evicted += num_evicted
            self.num_to_host += int((on_host > 0).sum())
            numbers[rest[::-1]] = -on_host
        return numbers

    def _assign(self, numbers: Ints, nodes: Ints) -> None:
        """Assign states to nodes; reset the states' stamps, numbers of rows, holds and pins."""
        self._nodes.state[nodes], self._owner[numbers] = numbers, nodes
        self._stamp[numbers], self._num_rows[numbers] = self._now, 0
        self._num_held[numbers], self._is_pinned[numbers] = 0, False

    @contextlib.contextmanager
    def filling(self, nodes: Ints) -> Iterator[None]:
        """Take the states from nodes if the ``with`` body, which fills the states, raises."""
        try:
            yield
        except BaseException:  # the states may be partly written
            self._nodes.state[nodes] = NO_STATE
            raise

    def _taken(self, count: int, num_needed: int) -> Ints:
        """Return up to ``count`` free states, evicting others if too few are free."""
        free = self._unused(count)
        if len(free) < count:
            gone = self._next_to_go(count - len(free), num_needed - len(free))
            self._let_go(gone)
            free = np.concatenate([free, gone])
        return free

    def _unused(self, count: int) -> Ints:
        """Return up to ``count`` states that no node has."""
        if len(self._free) - self._num_handed_out < count:
            # One scan finds all free states; a scan for every batch would cost time linear in
            # the size of the pool.
            self._free = np.flatnonzero(~self._is_used())[1:]  # without NO_STATE
            self._num_handed_out = 0
        found = self._free[self._num_handed_out : self._num_handed_out + count]
        self._num_handed_out += len(found)
        return found

    def _next_to_go(self, count: int, num_needed: int) -> Ints:
        """Return up to ``count`` states to evict, in order; ``num_needed`` new ones are needed."""
        can_go = np.flatnonzero(self._is_used() & (self._num_held == 0) & ~self._is_pinned)
        num_rows = self._num_rows[can_go]
        is_new, shared = (self._stamp[can_go] == self._now) & (num_rows == 0), can_go[num_rows > 1]
        gone = self._in_order(can_go[~is_new & (num_rows <= 1)], count)
        # A state that several rows of this batch continue from is evicted for optional states only
        # if the pool has a state for each context; a new state is evicted only for needed ones.
        most = count if self.num_states >= self._num_contexts else num_needed
        gone = np.concatenate([gone, self._in_order(shared, most - len(gone))])
        new = self._in_order(can_go[is_new], num_needed - len(gone))
        return np.concatenate([gone, new])

    def _in_order(self, numbers: Ints, count: int) -> Ints:
        """Return the ``count`` states to evict first: by last use, then by cost to recompute."""
        stamps, now = self._stamp[numbers], self._now
        if len(numbers) > count > 0:
            newest = np.partition(stamps, count - 1)[count - 1]
            if newest < now - _NUM_RECENT:  # the usual case: no recent state is evicted
                numbers, stamps = numbers[stamps <= newest], stamps[stamps <= newest]
        # By last use, but newest first among the four previous batches; a state that this batch
        # used ranks with the oldest of these four batches.
        ranks = np.where(stamps < now - _NUM_RECENT, stamps, 2 * now - stamps)
        ranks[stamps == now] += _NUM_RECENT
        owners = self._owner[numbers]
        is_end = self._nodes.num_children[owners] == 0
        order = np.lexsort((is_end, self._num_tokens(owners), ranks))
        return numbers[order[: max(count, 0)]]

    def _let_go(self, gone: Ints) -> None:
        """Evict states from their nodes; those that ``_worth_moving`` selects move to the host."""
        moved = self._worth_moving(gone) if self.host.num_states else gone[:0]
        moved = moved[np.argsort(self._stamp[moved], kind="stable")]
        stamps, nodes = self._stamp[moved], self._owner[moved]
        self._nodes.state[self._owner[gone]] = NO_STATE
        self.num_evicted += len(gone) - len(moved)
        if not len(moved):
            return
        assert self._moves is not None
        on_host, num_evicted = self.host.assign(nodes, stamps, self._now)
        has_room = on_host > 0
        self.num_evicted += num_evicted + int((~has_room).sum())
        self.num_to_host += int(has_room.sum())
        with self.filling(nodes):
            self._moves.to_host(moved[has_room].tolist(), on_host[has_room].tolist())

    def _worth_moving(self, gone: Ints) -> Ints:
        """Return the states of ``gone`` at a context's end, or far from the previous state."""
        # If each step adds a state, most are too near the previous one. A context's last state is
        # moved all the same, so that the context can continue without recomputation.
        owners = self._owner[gone]
        is_end = (self._nodes.num_children[owners] == 0) & (self._num_rows[gone] == 0)
        return gone[is_end | (self._num_tokens(owners) >= _FEWEST_TO_MOVE)]

    def _num_tokens(self, nodes: Ints) -> Ints:
        """Return how many tokens a pass has to compute to restore each node's state."""
        depths = self._nodes.depth
        return depths[nodes] - depths[self.last(self._nodes.parent[nodes])]

    # ---------------------------------------------------------------- pins and replaced nodes

    def pin(self, node: int) -> bool:
        """Keep a node's device state until ``clear()``; return whether it could be pinned."""
        # At least one state has to stay unpinned.
        number, others = self._nodes.state[node], self._is_pinned.copy()
        if number <= NO_STATE:
            return False
        others[number] = True
        if int((others & self._is_used()).sum()) >= self.num_states:
            return False
        self._is_pinned[number] = True
        return True

    def move(self, numbers: Ints, nodes: Ints) -> None:
        """Give states of replaced nodes to ``nodes``, linked in their place, if these have none."""
        # A state on the device also replaces one on the host.
        state, owners = self._nodes.state, (self._owner, self.host.owner)
        for i in np.flatnonzero(numbers != NO_STATE).tolist():
            node, number = nodes[i], int(numbers[i])
            if state[node] == NO_STATE or state[node] < 0 < number:
                state[node], owners[int(number < 0)][abs(number)] = number, node


@final
class HostStateCache:
    """An LRU cache of recurrent states in host memory, with negative numbers in ``Nodes.state``."""

    def __init__(self, nodes: Nodes, num_states: int) -> None:
        self._nodes, self.num_states = nodes, num_states
        self.clear()

    def clear(self) -> None:
        self.owner = np.zeros(self.num_states + 1, np.int32)
        self._stamp = np.zeros(self.num_states + 1, np.int64)

    @property
    def num_used(self) -> int:
        return int(self._is_used().sum())

    def _is_used(self) -> NDArray[np.bool_]:
        is_used = self._nodes.state[self.owner] == -np.arange(self.num_states + 1)
        is_used[NO_STATE] = False
        return is_used

    def touch(self, nodes: Ints, now: int) -> None:
        """Mark the host states of nodes, if any, as used in batch ``now``."""
        self._stamp[np.maximum(-self._nodes.state[nodes], NO_STATE)] = now

    def assign(self, nodes: Ints, stamps: Ints | int, now: int) -> tuple[Ints, int]:
        """Assign host states, last nodes first; return the numbers, and how many were evicted."""
        # A node without room gets the number 0. States used in batch ``now`` are not evicted.
        is_used = self._is_used()
        free = np.flatnonzero(~is_used)[1:][: len(nodes)]
        old = np.flatnonzero(is_used & (self._stamp < now))
        old = old[np.argsort(self._stamp[old], kind="stable")][: len(nodes) - len(free)]
        self._nodes.state[self.owner[old]] = NO_STATE
        found = np.concatenate([free, old])
        numbers = np.zeros(len(nodes), np.int64)
        numbers[len(nodes) - len(found) :] = found
        has_room = numbers > 0
        self.owner[found], self._nodes.state[nodes[has_room]] = nodes[has_room], -found
        self._stamp[found] = np.broadcast_to(stamps, len(nodes))[has_room]
        return numbers, len(old)
