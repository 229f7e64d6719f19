"""Recurrent states, which layers of state-space models keep after a token in the place of keys.

Such a layer has one state after each token, made of the one before, and no part of it belongs to a
token. So a node of a prefix tree may have a *state*: a snapshot of every such layer after its
token. What goes on from a context needs the state after its last token, and that alone.
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

_FEWEST_TO_MOVE: Final = 32
"""Tokens after another state from which on one is copied to the host: a guess, not measured."""

_NUM_RECENT: Final = 4
"""Batches in which particles may be asked in turn; those of the latest batch are asked last."""

_LONG_AGO: Final = 1 << 40
"""More batches than there will be."""

NO_STATE: Final = 0
"""The number that stands for no state: of a context that begins, or that is not kept."""


@final
@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the recurrent state after one token."""

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
    """Contents of one layer of a model's cache, which may be none."""

    attends: bool
    num_states: int

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing, as of a layer that reads what another one holds."""
        return not self.attends and not self.num_states


@final
@dataclass(frozen=True, slots=True)
class StateLayout:
    """The recurrent states of all layers; none if a model has no such layer."""

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
    """Preallocated recurrent states, by number from 1 on."""

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
        """Return copies of states, ``[n, *shape]`` each, in the order of the layout."""
        index = torch.as_tensor(numbers, dtype=torch.int64) - 1
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in self._tensors]

    def write(self, numbers: Ints, states: Sequence[torch.Tensor]) -> None:
        """Fill states with tensors as ``read`` returns them."""
        index = torch.as_tensor(numbers, dtype=torch.int64) - 1
        is_stretch = len(numbers) > 0 and bool((np.diff(numbers) == 1).all())
        for tensor, new in zip(self._tensors, states, strict=True):
            if is_stretch:  # as of most steps, in which a copy of blocks is twice as fast
                tensor[int(numbers[0]) - 1 : int(numbers[-1])] = new
            else:
                tensor.index_copy_(0, index.to(tensor.device), new.to(tensor.device, tensor.dtype))

    def is_finite(self, numbers: Ints) -> bool:
        """Return whether nothing in these states is infinite or NaN."""
        return all(bool(tensor.isfinite().all()) for tensor in self.read(numbers))


@final
class StateCache:
    """The recurrent states of nodes, by number, within a fixed budget."""

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
        self._owner = np.zeros(size, np.int32)  # the node that has had it last
        self._stamp = np.zeros(size, np.int64)  # batch of its last use
        self._num_rows = np.zeros(size, np.int32)  # that went on from it in this batch
        self._num_held = np.zeros(size, np.int32)
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
        is_used = self._nodes.state[self._owner] == np.arange(self.num_states + 1)
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

    def new_step(self, num_contexts: int) -> None:
        """Begin a batch of contexts: what earlier ones hold is held no more."""
        self._now, self._num_contexts = self._now + 1, num_contexts
        self._num_held[:] = self._num_rows[:] = 0

    def touch(self, nodes: Ints) -> None:
        """Note that nodes, and the states that they may have, are used in this batch."""
        self._stamp[self._numbers(nodes)] = self._now
        if self.host.num_states:
            self.host.touch(nodes, self._now)

    def _numbers(self, nodes: Ints) -> Ints:
        """Return the states of nodes, ``NO_STATE`` of those that have none on the device."""
        return np.maximum(self._nodes.state[nodes], NO_STATE)

    def hold(self, nodes: Ints) -> None:
        """Keep the states of nodes, if they have any, until they are released as often."""
        np.add.at(self._num_held, self._numbers(nodes), 1)

    def release(self, nodes: Ints) -> None:
        np.subtract.at(self._num_held, self._numbers(nodes), 1)

    def fetch(self, nodes: Ints) -> bool:
        """Bring states of nodes, of those that have any, to the device while the others stay."""
        state = self._nodes.state
        wanted = np.unique(nodes[state[nodes] < 0])
        if not len(wanted):
            return True
        is_kept = self._is_used() & (self._is_pinned | (self._num_held > 0))
        is_kept[self._numbers(nodes)] = True
        is_kept[NO_STATE] = False
        if self._moves is None or len(wanted) > self.num_states - int(is_kept.sum()):
            return False
        self.touch(wanted)  # so that none goes for one that comes to the host
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
        """Note that rows of this batch go on from nodes, whose new tokens are not linked yet."""
        numbers = self._numbers(nodes)
        np.add.at(self._num_rows, numbers, 1)
        # A context's end is the first to go once its only row leaves it.
        is_left = (self._nodes.num_children[nodes] == 0) & (self._num_rows[numbers] == 1)
        self._stamp[numbers[is_left]] = self._now - _LONG_AGO

    def give(self, nodes: Ints, num_needed: Ints) -> Ints:
        """Return numbers of states for nodes without one: negative on the host, 0 without room."""
        numbers = np.zeros(len(nodes), np.int64)
        asked = np.flatnonzero(self._nodes.state[nodes] <= 0)
        is_needed = num_needed[asked] > 0
        # Nodes that are near a state which several contexts share are the last to get one.
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
        """Have nodes own states that nothing is known of yet."""
        self._nodes.state[nodes], self._owner[numbers] = numbers, nodes
        self._stamp[numbers], self._num_rows[numbers] = self._now, 0
        self._num_held[numbers], self._is_pinned[numbers] = 0, False

    @contextlib.contextmanager
    def filling(self, nodes: Ints) -> Iterator[None]:
        """Take states that were given to nodes from them again if filling them fails."""
        try:
            yield
        except BaseException:  # there is no telling what is in them
            self._nodes.state[nodes] = NO_STATE
            raise

    def _taken(self, count: int, num_needed: int) -> Ints:
        """Return free states, up to so many, for which others may have gone."""
        free = self._unused(count)
        if len(free) < count:
            gone = self._next_to_go(count - len(free), num_needed - len(free))
            self._let_go(gone)
            free = np.concatenate([free, gone])
        return free

    def _unused(self, count: int) -> Ints:
        """Return up to ``count`` states that no node has."""
        if len(self._free) - self._num_handed_out < count:
            # All at once: a look at each state for every batch would cost more, the larger the
            # store.
            self._free = np.flatnonzero(~self._is_used())[1:]  # of all but NO_STATE
            self._num_handed_out = 0
        found = self._free[self._num_handed_out : self._num_handed_out + count]
        self._num_handed_out += len(found)
        return found

    def _next_to_go(self, count: int, num_needed: int) -> Ints:
        """Return states that may go for others, the first ones first."""
        can_go = np.flatnonzero(self._is_used() & (self._num_held == 0) & ~self._is_pinned)
        num_rows = self._num_rows[can_go]
        is_new, shared = (self._stamp[can_go] == self._now) & (num_rows == 0), can_go[num_rows > 1]
        gone = self._in_order(can_go[~is_new & (num_rows <= 1)], count)
        # States that several rows of this batch have gone on from go if each of its contexts has
        # room for one, or if needed, as do those that the batch has made.
        most = count if self.num_states >= self._num_contexts else num_needed
        gone = np.concatenate([gone, self._in_order(shared, most - len(gone))])
        new = self._in_order(can_go[is_new], num_needed - len(gone))
        return np.concatenate([gone, new])

    def _in_order(self, numbers: Ints, count: int) -> Ints:
        """Return so many states by their last use; then by the tokens to compute again."""
        stamps, now = self._stamp[numbers], self._now
        if len(numbers) > count > 0:
            newest = np.partition(stamps, count - 1)[count - 1]
            if newest < now - _NUM_RECENT:  # as a rule; all others are as many as a few batches use
                numbers, stamps = numbers[stamps <= newest], stamps[stamps <= newest]
        # The least recent first; but of the last batches the most recent, those of this one last.
        ranks = np.where(stamps < now - _NUM_RECENT, stamps, 2 * now - stamps)
        ranks[stamps == now] += _NUM_RECENT
        owners = self._owner[numbers]
        is_end = self._nodes.num_children[owners] == 0
        order = np.lexsort((is_end, self._num_tokens(owners), ranks))
        return numbers[order[: max(count, 0)]]

    def _let_go(self, gone: Ints) -> None:
        """Take states from their nodes, and copy those to the host that are worth it."""
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
        """Return the states of ``gone`` that nothing has gone on from, or that are far apart."""
        # If every step leaves a state, few tokens are between them. A context's last state goes to
        # the host however few they are, so that the context goes on without computing any again.
        owners = self._owner[gone]
        is_end = (self._nodes.num_children[owners] == 0) & (self._num_rows[gone] == 0)
        return gone[is_end | (self._num_tokens(owners) >= _FEWEST_TO_MOVE)]

    def _num_tokens(self, nodes: Ints) -> Ints:
        """Return how many tokens the states of nodes are to compute again."""
        depths = self._nodes.depth
        return depths[nodes] - depths[self.last(self._nodes.parent[nodes])]

    # ---------------------------------------------------------------- beside batches

    def pin(self, node: int) -> bool:
        """Keep a node's state until ``clear()``, if it has one here and others have room."""
        number, others = self._nodes.state[node], self._is_pinned.copy()
        if number <= NO_STATE:
            return False
        others[number] = True
        if int((others & self._is_used()).sum()) >= self.num_states:
            return False
        self._is_pinned[number] = True
        return True

    def move(self, numbers: Ints, nodes: Ints) -> None:
        """Give states to nodes that stand for those that had them, if they have none."""
        state, owners = self._nodes.state, (self._owner, self.host.owner)
        for i in np.flatnonzero(numbers != NO_STATE).tolist():
            node, number = nodes[i], int(numbers[i])
            if state[node] == NO_STATE or state[node] < 0 < number:
                state[node], owners[int(number < 0)][abs(number)] = number, node


@final
class HostStateCache:
    """Recurrent states in host memory, negative in ``Nodes.state``; the least recent go first."""

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
        """Note that the states that nodes may have here are used in a batch."""
        self._stamp[np.maximum(-self._nodes.state[nodes], NO_STATE)] = now

    def assign(self, nodes: Ints, stamps: Ints | int, now: int) -> tuple[Ints, int]:
        """Have nodes own states here, as far as there is room; none of this batch goes for them."""
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
