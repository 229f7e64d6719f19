"""Recurrent states of a prefix tree, against a plain dictionary of whose state each one is."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.prefix.slot_allocator import SlotAllocator
from genlm_backend.prefix.state_cache import StateCache
from tests.tree_integrity import check_integrity

contexts = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
namespaces = st.sampled_from([None, None, "adapter"])

NUM_RECENT = 4
"""Batches of which the most recent states go first, and not the oldest."""


class Copies:
    """Knows which context each state is of; where keys and values are is another test's."""

    def __init__(self):
        self.device, self.host = {}, {}

    def to_host(self, device_numbers, host_numbers):
        assert len(set(host_numbers)) == len(device_numbers) == len(host_numbers)
        self.host.update(
            {h: self.device.get(d) for d, h in zip(device_numbers, host_numbers, strict=True)}
        )

    def to_device(self, host_numbers, device_numbers):
        assert len(set(device_numbers)) == len(device_numbers) == len(host_numbers)
        self.device.update(
            {d: self.host.get(h) for d, h in zip(device_numbers, host_numbers, strict=True)}
        )

    def write(self, number, key):
        (self.device if number > 0 else self.host)[abs(number)] = key

    def read(self, number):
        return (self.device if number > 0 else self.host)[abs(number)]


def ints(*numbers):
    return np.array(numbers, np.int32)


class History(RuleBasedStateMachine):
    """Knows of each context that has a state which one that is."""

    num_slots, num_host_slots, num_states, num_on_host = 24, 0, 4, 0

    def __init__(self):
        super().__init__()
        self.copies = Copies()
        self.tree = PrefixTree(
            SlotAllocator(self.num_slots),
            SlotAllocator(self.num_host_slots),
            Copies(),
            partial(
                StateCache,
                num_states=self.num_states,
                num_on_host=self.num_on_host,
                moves=self.copies,
            ),
        )
        self.states = self.tree.states
        self.has = {}  # number of its state, by namespace and context
        self.used = {}  # batch of its last use, likewise
        self.batch = 0
        self.held, self.pinned = [], []

    # ---------------------------------------------------------------- looking

    def node_of(self, key):
        """The node of a context that is linked, or `None`."""
        namespace, context = key
        node = self.tree.nodes.walk(self.tree.root(namespace), ints(*context))
        return node if self.tree.nodes.depth[node] == len(context) else None

    def last(self, key, below=None):
        """The length of the longest beginning that has a state."""
        namespace, context = key
        sizes = range(len(context) if below is None else below, 0, -1)
        return next((size for size in sizes if (namespace, context[:size]) in self.has), 0)

    def forget_what_has_gone(self):
        for key in [key for key in self.has if self.node_of(key) is None]:
            del self.has[key]

    def see_what_moved(self):
        """Note which states are elsewhere now, and return those that are nowhere."""
        gone = set()
        for key in list(self.has):
            self.has[key] = int(self.tree.nodes.state[self.node_of(key)])
            if not self.has[key]:
                gone.add(key)
                del self.has[key]
        return gone

    def fetch(self, keys, nodes):
        """Bring states to the device; return whether there was room for them."""
        before, evicted = dict(self.has), self.states.num_evicted
        distinct = {key for key in keys if key in self.has}
        others = {*self.pinned, *distinct, *(key for key in self.held if key in before)}
        kept = {key for key in others if before[key] > 0}
        wanted = {key for key in distinct if before[key] < 0}
        has_come = self.states.fetch(nodes)
        gone = self.see_what_moved()
        assert has_come == (not wanted or len(wanted) + len(kept) <= self.num_states)
        assert not gone & (distinct | kept)
        assert self.states.num_evicted - evicted == len(gone)
        if not has_come:
            assert self.has == before
            return False
        assert all(self.has[key] > 0 for key in distinct)
        for key in distinct:
            self.used[key] = self.batch
        return True

    def is_on_device(self, key):
        return self.tree.nodes.slot[self.node_of(key)] > 0

    def allocate(self, count, ends):
        """Slots, or `None`; what comes back from the host for them is used."""
        on_host = [key for key in self.has if not self.is_on_device(key)]
        slots = self.tree.allocate(count, ends)
        self.forget_what_has_gone()
        back = [key for key in on_host if key in self.has and self.is_on_device(key)]
        self.used.update(dict.fromkeys(back, self.batch))
        return slots

    # ---------------------------------------------------------------- giving

    def go_on_from(self, nodes, keys):
        """Rows go on from the nodes of contexts; an end that a single row leaves goes first."""
        for node, key in zip(nodes.tolist(), keys, strict=True):
            is_end = self.tree.nodes.num_children[node] == 0
            if is_end and nodes.tolist().count(node) == 1:
                self.used[key] = self.batch - 1_000_000
        self.states.go_on_from(nodes)

    def rank(self, key):
        """The least recent ones go first; of the last batches, the most recent ones."""
        age = self.batch - self.used[key]
        return NUM_RECENT - age if age > NUM_RECENT else age

    def give(self, nodes, keys, num_needed):
        """Give states; check who has had to go for them."""
        others = {key: number for key, number in self.has.items() if number > 0}
        can_go = {k for k in others if k not in self.held and k not in self.pinned}
        old = {k for k in can_go if self.used[k] < self.batch}
        num_evicted = self.states.num_evicted
        numbers = self.states.give(nodes, np.array(num_needed))
        assert not self.num_on_host or all(numbers[i] >= 0 for i, n in enumerate(num_needed) if n)
        given = [n for n in numbers.tolist() if n]
        assert len(set(given)) == len(given)
        gone = {key for key, number in others.items() if number in given}
        assert gone <= can_go
        nowhere = self.see_what_moved()
        assert len(gone) <= len(given)
        assert len(nowhere) <= self.states.num_evicted - num_evicted <= 2 * len(given)
        if not self.num_on_host:
            assert nowhere == gone
        left = old - gone
        if left:
            assert max(map(self.rank, gone & old), default=-math.inf) <= min(map(self.rank, left))
            pairs = zip(numbers, keys, strict=True)
            assert all(number or key in others for number, key in pairs)
        for number, count, key in zip(numbers, num_needed, keys, strict=True):
            assert number or not count or can_go <= gone
            if number:
                self.copies.write(int(number), key)
            if number and count:
                self.held.append(key)
        return numbers.tolist()

    def chain(self, key):
        """Grow a context behind its last state; return its new nodes, and the node before them."""
        namespace, context = key
        start = self.last(key)
        node = self.node_of((namespace, context[:start])) if start else self.tree.root(namespace)
        self.tree.touch(ints(node))
        if start:
            self.used[namespace, context[:start]] = self.batch
        if start == len(context) or not self.fetch([(namespace, context[:start])], ints(node)):
            return None
        slots = self.allocate(len(context) - start, [node])
        if slots is None:
            return None
        return self.tree.append(node, ints(*context[start:]), slots), node

    @rule()
    def begin(self):
        self.tree.new_step()
        self.batch += 1
        self.held.clear()

    @rule(
        wanted=st.lists(st.tuples(namespaces, contexts), min_size=1, max_size=4),
        num_needed=st.lists(st.integers(0, 2), min_size=4, max_size=4),
        is_sound=st.integers(0, 4),
    )
    def compute(self, wanted, num_needed, is_sound):
        """Contexts behind their last states, alike ones among them; all are kept or none."""
        self.begin()
        grown = [(key, self.chain(key)) for key in wanted]
        grown = [(key, *chain) for key, chain in grown if chain is not None]
        befores = ints(*(before for *_, before in grown))
        starts = [(key[0], key[1][: len(key[1]) - len(new)]) for key, new, _ in grown]
        if not grown or not self.fetch(starts, befores):  # as one may have gone for another
            for _, new, _ in grown:
                self.tree.free(new)
            return
        ends = np.concatenate([new[-1:] for _, new, _ in grown])
        self.states.hold(befores)
        self.states.release(befores)
        keys, needed = [key for key, *_ in grown], num_needed[: len(grown)]
        self.go_on_from(befores, starts)
        numbers = self.give(ends, keys, needed)
        new = np.concatenate([new for _, new, _ in grown])
        if not is_sound:
            self.tree.free(new)
            self.held.clear()
            return
        self.tree.insert(new)
        self.held.clear()
        for key in dict.fromkeys(keys):
            of_key = {n for k, n in zip(keys, numbers, strict=True) if k == key and n}
            self.used[key] = self.batch
            if key not in self.has and of_key:
                self.has[key] = int(self.tree.nodes.state[self.node_of(key)])
                assert self.has[key] in of_key

    @precondition(lambda self: self.has)
    @rule(chosen=st.lists(st.tuples(st.integers(0), st.integers(0, 2)), min_size=1, max_size=6))
    def step(self, chosen):
        """One token behind contexts that have a state, which may be there already."""
        self.begin()
        known = sorted(self.has, key=repr)
        rows = [(known[i % len(known)], token) for i, token in dict.fromkeys(chosen)]
        nodes = ints(*(self.node_of(key) for key, _ in rows))
        self.tree.touch(nodes)
        for key, _ in rows:
            self.used[key] = self.batch
        if not self.fetch([key for key, _ in rows], nodes):
            return
        slots = self.allocate(len(rows), nodes)
        if slots is None:
            return
        new = self.tree.append(nodes, ints(*(token for _, token in rows)), slots)
        self.go_on_from(nodes, [key for key, _ in rows])
        kept = self.tree.insert(new)
        own, first = np.unique(kept, return_index=True)
        keys = [(rows[i][0][0], (*rows[i][0][1], rows[i][1])) for i in first.tolist()]
        for key in keys:
            self.used[key] = self.batch
        numbers = self.give(own, keys, [0] * len(own))
        for key, number in zip(keys, numbers, strict=True):
            if number:
                self.has[key] = number

    @precondition(lambda self: self.has)
    @rule(
        chosen=st.lists(st.integers(0), min_size=1, max_size=3), key=st.tuples(namespaces, contexts)
    )
    def hold(self, chosen, key):
        """What is held stays, as often as it is, whatever is needed; what is released may go."""
        self.begin()
        known = sorted(self.has, key=repr)
        held = [known[i % len(known)] for i in chosen]
        nodes = ints(*(self.node_of(key) for key in held))
        self.tree.touch(nodes)
        for each in held:
            self.used[each] = self.batch
        if not self.fetch(held, nodes):
            return
        self.states.hold(nodes)
        self.held = list(held)
        grown = self.chain(key)
        if grown is None:
            return
        new, before = grown
        self.go_on_from(ints(before), [(key[0], key[1][: -len(new)])])
        self.give(new[-1:], [key], [1])
        self.states.release(nodes)
        self.tree.free(new)
        self.held.clear()

    @precondition(lambda self: self.has)
    @rule(index=st.integers(0))
    def pin(self, index):
        self.begin()
        known = sorted(self.has, key=repr)
        key = known[index % len(known)]
        node = self.node_of(key)
        if not self.is_on_device(key):
            return
        if self.has[key] < 0:
            assert not self.states.pin(node)
        if not self.fetch([key], ints(node)):
            return
        others = {*self.pinned, key}
        assert self.states.pin(node) == (len(others) < self.num_states)
        if len(others) < self.num_states:
            self.tree.pin(node)
            self.pinned.append(key)

    @rule(key=st.tuples(namespaces, contexts))
    def fill_in_vain(self, key):
        """What could not be filled nobody has."""
        self.begin()
        grown = self.chain(key)
        if grown is None:
            return
        new, before = grown
        self.go_on_from(ints(before), [(key[0], key[1][: -len(new)])])
        end = self.tree.insert(new)[-1:]
        (number,) = self.give(end, [key], [0])
        if number:
            with pytest.raises(MemoryError), self.states.filling(end):
                raise MemoryError

    # ---------------------------------------------------------------- going

    @rule(count=st.integers(0, 30))
    def evict(self, count):
        self.begin()
        self.tree.evict(count)
        self.forget_what_has_gone()

    @rule()
    def clear(self):
        self.tree.clear()
        self.has.clear()
        self.pinned.clear()
        assert self.states.num_used == self.tree.slots.num_used == 0

    # ---------------------------------------------------------------- always

    @invariant()
    def adds_up(self):
        check_integrity(self.tree)
        assert self.states.num_used == sum(n > 0 for n in self.has.values()) <= self.num_states
        on_host = self.states.host.num_used
        assert on_host == sum(n < 0 for n in self.has.values()) <= self.num_on_host

    @invariant()
    def each_state_is_its_contexts(self):
        assert len(set(self.has.values())) == len(self.has)
        for key, number in self.has.items():
            assert self.tree.nodes.state[self.node_of(key)] == number
            assert self.copies.read(number) == key

    @invariant()
    def pins_hold(self):
        for key in self.pinned:
            assert self.has[key] > 0
            assert self.tree.num_cached(key[1], key[0]) == len(key[1])

    @rule(key=st.tuples(namespaces, contexts))
    def count(self, key):
        assert self.tree.num_cached(key[1], key[0]) == self.last(key)


class OneState(History):
    num_states = 1


class StatesOnHost(History):
    num_states, num_on_host = 3, 4


class StatesAndTokensOnHost(History):
    num_slots, num_host_slots, num_states, num_on_host = 12, 30, 3, 20


_MACHINES = (History, OneState, StatesOnHost, StatesAndTokensOnHost)
for _machine in _MACHINES:
    _machine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
TestHistory = History.TestCase
TestOneState = OneState.TestCase
TestStatesOnHost = StatesOnHost.TestCase
TestStatesAndTokensOnHost = StatesAndTokensOnHost.TestCase
# ---------------------------------------------------------------- one at a time


def tree_of(num_states, *computed):
    """A tree in which contexts were given states, one batch after the other."""
    tree = PrefixTree(SlotAllocator(100), states=partial(StateCache, num_states=num_states))
    for context in computed:
        add(tree, context)
    return tree


def add(tree, context, num_needed=0):
    tree.new_step()
    root = tree.root(None)
    node = tree.states.last(ints(tree.nodes.walk(root, ints(*context))))
    tree.touch(node)
    rest = ints(*context[tree.nodes.depth[node[0]] :])
    new = tree.append(int(node[0]), rest, tree.allocate(len(rest), node))
    tree.states.go_on_from(node)
    tree.insert(new)
    return tree.states.give(new[-1:], np.array([num_needed])).tolist()


def test_oldest_states_are_evicted_first_and_of_equals_the_cheapest():
    tree = tree_of(3, [1, 2, 3], [4, 5], [6])
    tree.new_step()
    for context in ([1, 2, 3], [4, 5]):  # at one time; the third is older
        tree.touch(ints(tree.nodes.walk(tree.root(None), ints(*context))))
    for _ in range(NUM_RECENT):
        tree.new_step()
    add(tree, [7, 7])
    assert [tree.num_cached(c) for c in ([1, 2, 3], [4, 5], [6], [7, 7])] == [3, 2, 0, 2]
    add(tree, [8])
    assert [tree.num_cached(c) for c in ([1, 2, 3], [4, 5], [7, 7], [8])] == [3, 0, 2, 1]
    assert tree.states.num_evicted == 2


def test_state_that_a_single_row_extends_is_evicted_for_its_successor():
    """And what several go on from stays: each step of those that have none begins there."""
    tree = tree_of(2, [1] * 9)
    prompt = ints(tree.nodes.walk(tree.root(None), ints(*[1] * 9)))
    for _ in range(2):
        tree.new_step(5)
        nodes = np.repeat(prompt, 5)
        tree.touch(nodes)
        new = tree.append(nodes, ints(*range(5)), tree.allocate(5, nodes))
        tree.states.go_on_from(nodes)
        new = tree.insert(new)
        numbers = tree.states.give(new, np.zeros(5, np.int64))
        assert tree.nodes.state[prompt] > 0
    (row,) = np.flatnonzero(tree.nodes.state[new])
    assert not any(numbers)
    for number in range(3):
        tree.new_step()
        tree.touch(prompt)
        tree.touch(new[row : row + 1])
        end = tree.append(new[row : row + 1], ints(5), tree.allocate(1, new[row : row + 1]))
        tree.states.go_on_from(new[row : row + 1])
        tree.insert(end)
        assert tree.states.give(end, np.zeros(1, np.int64)).all()
        assert tree.nodes.state[prompt] > 0
        assert tree.num_cached([1] * 9 + [int(row)] + [5] * (number + 1)) == 11 + number
        new[row] = end[0]


def test_pinning_a_node_without_a_state_returns_false():
    tree = tree_of(2, [1, 2])
    (first,) = ints(tree.nodes.walk(tree.root(None), ints(1)))
    assert not tree.states.pin(first)
    assert not tree.states.pin(int(tree.root(None)))
    assert all(add(tree, [token])[0] > 0 for token in (3, 4, 5))  # none stays for ever
