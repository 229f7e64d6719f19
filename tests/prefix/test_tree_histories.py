"""The tree against a plain dictionary that remembers what each slot holds."""

from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from genlm_backend.errors import CacheError
from genlm_backend.prefix.nodes import NO_HINT
from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.prefix.slot_allocator import SlotAllocator
from tests.naive import naive_longest_prefix
from tests.tree_integrity import check_integrity

contexts = st.lists(st.integers(0, 2), min_size=1, max_size=10)
namespaces = st.sampled_from([None, None, "adapter"])


class Copies:
    """Moves what slots have been filled with."""

    def __init__(self):
        self.device, self.host = {}, {}
        self.is_broken = False
        self.num_to_device = self.num_to_host = 0

    def to_host(self, device_slots, host_slots):
        self.copy(self.device, device_slots, self.host, host_slots)
        self.num_to_host += len(host_slots)

    def to_device(self, host_slots, device_slots):
        self.copy(self.host, host_slots, self.device, device_slots)
        self.num_to_device += len(device_slots)

    def copy(self, source, from_slots, target, to_slots):
        assert len(from_slots) == len(to_slots) == len(set(to_slots))
        found = [source.get(slot) for slot in from_slots]
        if self.is_broken:  # halfway
            found = [None] * len(found)
        target.update(zip(to_slots, found, strict=True))
        if self.is_broken:
            raise RuntimeError("broken")


class Tree(RuleBasedStateMachine):
    """Knows which context's last token each slot was filled with."""

    num_slots, num_host_slots = 24, 0
    places = Bundle("places")

    def __init__(self):
        super().__init__()
        self.copies = Copies()
        self.cache = PrefixTree(
            SlotAllocator(self.num_slots), SlotAllocator(self.num_host_slots), self.copies
        )
        self.used: list[tuple[int, list[int], str | None]] = []  # in this round
        self.seen: list[tuple[list[int], str | None]] = []
        self.pinned: list[tuple[str | None, list[int]]] = []
        self.pending: list[int] = []

    def held(self):
        return self.cache.nodes.slot[self.pending].tolist()

    def contents(self, nodes):
        slots = self.cache.nodes.slot[nodes].tolist()
        return [self.copies.device[slot] if slot > 0 else self.copies.host[-slot] for slot in slots]

    def check_node(self, node, token_ids, namespace):
        size = int(self.cache.nodes.depth[node])
        wanted = [(namespace, tuple(token_ids[: i + 1])) for i in range(size)]
        assert self.contents(self.cache.nodes.path(node)) == wanted

    def num_on_host(self, node):
        return int((self.cache.nodes.slot[self.cache.nodes.path(node)] < 0).sum())

    @property
    def num_used(self):
        return self.cache.slots.num_used + self.cache.host_slots.num_used

    @rule()
    def begin(self):
        self.cache.new_step()
        self.used.clear()

    def look_up(self, token_ids, namespace, hint=NO_HINT):
        num_cached = self.cache.num_cached(token_ids, namespace)
        tiers = [self.cache.num_cached(token_ids, namespace, tier) for tier in ("device", "host")]
        table = self.cache.nodes.table
        cached = [ids for own, ids in self.contents(table[table > 0]) if own == namespace]
        assert num_cached == naive_longest_prefix(token_ids, cached)
        node = self.cache.match(token_ids, namespace, hint)
        assert self.cache.nodes.depth[node] == num_cached == sum(tiers)
        assert self.num_on_host(node) == tiers[1]
        self.check_node(node, token_ids, namespace)
        self.used.append((node, token_ids, namespace))
        return node

    @rule(token_ids=contexts, namespace=namespaces)
    def use(self, token_ids, namespace):
        self.look_up(token_ids, namespace)

    def write(self, node, token_ids, namespace):
        self.copies.device[int(self.cache.nodes.slot[node])] = (namespace, tuple(token_ids))

    @rule(target=places, token_ids=contexts, namespace=namespaces, is_kept=st.integers(0, 4))
    def fill(self, token_ids, namespace, is_kept):
        node = self.look_up(token_ids, namespace)
        start = int(self.cache.nodes.depth[node])
        slots = self.cache.allocate(len(token_ids) - start, [node])
        if slots is None:
            return self.remembered(node), token_ids[:start], namespace
        assert self.num_on_host(node) == 0
        chain = self.cache.append(node, np.array(token_ids[start:], np.int32), slots)
        check_integrity(self.cache, slots.tolist())
        for index, each in enumerate(chain.tolist()):
            self.write(each, token_ids[: start + index + 1], namespace)
        if not is_kept:
            self.cache.free(chain)
            return self.remembered(node), token_ids[:start], namespace
        node = int(self.cache.insert(chain)[-1]) if len(chain) else node
        self.check_node(node, token_ids, namespace)
        self.seen.append((token_ids, namespace))
        self.used.append((node, token_ids, namespace))
        return self.remembered(node), token_ids, namespace

    def remembered(self, node):
        return next(iter(self.cache.nodes.cache_hints(np.array([node], np.int32))))

    @precondition(lambda self: self.seen)
    @rule(
        chosen=st.lists(st.tuples(st.integers(0), st.integers(0, 10), st.integers(0, 2))),
        keep=st.booleans(),
    )
    def step(self, chosen, keep):
        """Rows one token longer, some of them there already, alike, or on the host."""
        rows = []
        for index, size, token in chosen:
            token_ids, namespace = self.seen[index % len(self.seen)]
            token_ids = token_ids[:size]
            node = self.look_up(token_ids, namespace)
            if self.cache.nodes.depth[node] == len(token_ids):
                rows.append((node, [*token_ids, token], namespace))
        nodes = np.array([node for node, _, _ in rows], np.int32)
        slots = self.cache.allocate(len(rows), nodes)
        if slots is None or not rows:
            return
        tokens = np.array([token_ids[-1] for _, token_ids, _ in rows], np.int32)
        new = self.cache.append(nodes, tokens, slots)
        for node, (_, token_ids, namespace) in zip(new.tolist(), rows, strict=True):
            self.write(node, token_ids, namespace)
        check_integrity(self.cache, slots.tolist())
        if not keep:
            self.cache.free(new)
            return
        for node, (_, *row) in zip(self.cache.insert(new).tolist(), rows, strict=True):
            self.check_node(node, *row)
            self.used.append((node, *row))

    @precondition(lambda self: self.seen)
    @rule(index=st.integers(0), more=st.lists(st.integers(0, 2), max_size=2))
    def look_up_again(self, index, more):
        token_ids, namespace = self.seen[index % len(self.seen)]
        self.look_up([*token_ids, *more], namespace)

    @rule(held=places, num_kept=st.integers(0, 10), more=st.lists(st.integers(0, 2), max_size=6))
    def look_up_from(self, held, num_kept, more):
        """What begins as a remembered context does, or is a part of it, is found as ever."""
        hint, token_ids, namespace = held
        self.look_up(token_ids[:num_kept] or [1], namespace, hint if num_kept else NO_HINT)
        self.look_up([*token_ids, *more] or [1], namespace, hint)

    @rule(held=places)
    def look_up_elsewhere(self, held):
        """A place counts for nothing in another namespace."""
        hint, _, namespace = held
        other = "adapter" if namespace is None else None
        assert self.cache.nodes.at([hint], self.cache.root(other)).tolist() == [0]

    @precondition(lambda self: len(self.pinned) < 2 and self.used)
    @rule()
    def pin(self):
        node, token_ids, namespace = self.used[-1]
        if not self.num_on_host(node) and self.cache.nodes.depth[node]:
            self.cache.pin(node)
            self.pinned.append((namespace, token_ids[: self.cache.nodes.depth[node]]))

    @rule(count=st.integers(0, 4) | st.integers(0, 30))
    def evict(self, count):
        used, both = self.cache.slots.num_used, self.num_used
        moved, evicted = self.cache.num_to_host, self.cache.num_evicted
        freed = self.cache.evict(count)
        assert freed <= count
        assert self.cache.slots.num_used == used - freed
        assert self.cache.num_evicted - evicted == both - self.num_used
        assert self.cache.num_to_host - moved <= freed

    @rule(count=st.integers(1, 30))
    def evict_in_vain(self, count):
        """What has been moved nobody knows where is not found."""
        used, moved = self.cache.slots.num_used, self.cache.num_to_host
        self.copies.is_broken = True
        both, evicted = self.num_used, self.cache.num_evicted
        try:
            freed = self.cache.evict(count)
        except RuntimeError:
            freed = used - self.cache.slots.num_used
            assert freed > 0
        finally:
            self.copies.is_broken = False
        assert self.cache.num_to_host == moved
        assert self.cache.slots.num_used == used - freed
        assert self.cache.num_evicted - evicted == both - self.num_used

    @precondition(lambda self: self.used)
    @rule()
    def fetch_in_vain(self):
        node, token_ids, namespace = self.used[-1]
        on_host = self.num_on_host(node)
        self.copies.is_broken = True
        try:
            self.cache.allocate(0, [node])
        except RuntimeError:
            pass
        finally:
            self.copies.is_broken = False
        assert self.num_on_host(node) == on_host
        self.check_node(node, token_ids, namespace)

    @rule()
    def clear(self):
        slots = self.cache.allocate(1)
        if slots is not None:
            with pytest.raises(CacheError, match="filled"):
                self.cache.clear()
            self.cache.slots.free(slots)
        self.cache.clear()
        self.used.clear()
        self.pinned.clear()
        assert self.num_used == 0

    @invariant()
    def what_has_moved_is_counted(self):
        copies, cache = self.copies, self.cache
        assert (cache.num_to_device, cache.num_to_host) == (
            copies.num_to_device,
            copies.num_to_host,
        )

    @invariant()
    def adds_up(self):
        check_integrity(self.cache)

    @invariant()
    def what_is_used_stays(self):
        for used in self.used:
            self.check_node(*used)

    @invariant()
    def pins_hold(self):
        for namespace, token_ids in self.pinned:
            assert self.cache.num_cached(token_ids, namespace, "device") == len(token_ids)


class TieredTree(Tree):
    num_slots, num_host_slots = 12, 10


class TreeAboveMuch(Tree):
    num_slots, num_host_slots = 10, 60


class TreeAboveLittle(Tree):
    num_slots, num_host_slots = 16, 3


for _machine in (Tree, TieredTree, TreeAboveMuch, TreeAboveLittle):
    _machine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestTree = Tree.TestCase
TestTieredTree = TieredTree.TestCase
TestTreeAboveMuch = TreeAboveMuch.TestCase
TestTreeAboveLittle = TreeAboveLittle.TestCase


@pytest.mark.parametrize("sizes", [(30, 0), (12, 10), (10, 60)])
def test_contexts_in_use_survive_long_histories_of_eviction(sizes):
    """Long histories in which much is evicted, and some of it wanted again."""
    random, num_on_host = Random(0), 0
    for _ in range(5):
        tree = Tree()
        tree.cache = PrefixTree(*map(SlotAllocator, sizes), tree.copies)
        for _ in range(150):
            tree.begin()
            begin = random.choice(tree.seen)[0] if tree.seen and random.random() < 0.8 else []
            kept = begin[: random.randint(0, len(begin))] if random.random() < 0.4 else begin
            context = [*kept, *random.choices(range(3), k=random.randint(1, 4))][:10]
            if random.random() < 0.7:
                num_on_host += tree.cache.num_cached(context, None, "host")
                tree.fill(context, None, random.randint(0, 9))
            else:
                chosen = [(random.randint(0, 99), random.randint(0, 10), random.randint(0, 2))]
                tree.step(chosen * 2, True) if tree.seen else None
            tree.what_is_used_stays()
            check_integrity(tree.cache)
    assert not sizes[1] or num_on_host > 5


def test_eviction_takes_the_least_recently_used_tokens_first():
    cache = PrefixTree(SlotAllocator(30))
    for context in ([1, 2, 3], [1, 2, 4], [5, 6, 7]):
        cache.new_step()
        node = cache.match(context)
        rest = np.array(context[cache.nodes.depth[node] :], np.int32)
        cache.insert(cache.append(node, rest, cache.allocate(len(rest))))
    cache.new_step()
    cache.match([1, 2, 3])
    assert cache.evict(100) == 4
    assert cache.num_cached([1, 2, 3]) == 3
    cache.new_step()
    cache.insert(cache.append(cache.match([8]), np.array([8], np.int32), cache.allocate(1)))
    cache.new_step()
    assert cache.evict(2) == 2
    assert cache.num_cached([1, 2, 3]) == 1
    assert cache.num_cached([8]) == 1
