"""The prefix cache against a plain dictionary that remembers what each slot holds."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from genlm_backend.cache import (
    KVLayout,
    KVPool,
    LayerLayout,
    Match,
    NullPrefixCache,
    RadixPrefixCache,
)
from genlm_backend.errors import CacheError

LAYOUT = KVLayout((LayerLayout(1, 1, 1, 1, torch.float32, torch.device("cpu")),))


def make(num_slots):
    return RadixPrefixCache(KVPool(LAYOUT, (num_slots + 1) * LAYOUT.bytes_per_slot))


def fill(cache, token_ids, namespace=None):
    """Match and insert a whole context; return the match."""
    match = cache.match(token_ids, namespace)
    rest = token_ids[match.num_tokens :]
    slots = cache.allocate(len(rest))
    assert slots is not None
    return cache.insert(match, rest, slots)


contexts = st.lists(st.integers(0, 2), min_size=1, max_size=10)


class Radix(RuleBasedStateMachine):
    """``written`` says which context's last token each slot was filled with."""

    num_slots = 24
    matches = Bundle("matches")

    def __init__(self):
        super().__init__()
        self.cache = make(self.num_slots)
        self.written: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.live: list[tuple[Match, tuple]] = []
        self.pinned: list[tuple[str | None, list[int]]] = []

    def check_match(self, match, token_ids, namespace):
        for index, slot in enumerate(match.slots):
            assert self.written[slot] == (namespace, tuple(token_ids[: index + 1]))

    @rule(target=matches, token_ids=contexts, namespace=st.sampled_from([None, "adapter"]))
    def look_up(self, token_ids, namespace):
        num_cached = self.cache.peek(token_ids, namespace)
        match = self.cache.match(token_ids, namespace)
        assert match.num_tokens == num_cached
        self.check_match(match, token_ids, namespace)
        return match, token_ids, namespace

    @rule(target=matches, held=consumes(matches))
    def extend(self, held):
        match, token_ids, namespace = held
        rest = token_ids[match.num_tokens :]
        slots = self.cache.allocate(len(rest))
        if slots is None:
            return held
        self.cache.check_integrity(slots)
        for index, slot in enumerate(slots):
            self.written[slot] = (namespace, tuple(token_ids[: match.num_tokens + index + 1]))
        longer = self.cache.insert(match, rest, slots)
        self.check_match(longer, token_ids, namespace)
        return longer, token_ids, namespace

    @rule(held=consumes(matches))
    def give_back(self, held):
        self.cache.release(held[0])
        self.cache.release(held[0])

    @rule(held=consumes(matches))
    def give_up(self, held):
        match, token_ids, _ = held
        slots = self.cache.allocate(len(token_ids) - match.num_tokens)
        if slots is not None:
            self.cache.free(slots)
        self.cache.release(match)

    @precondition(lambda self: len(self.pinned) < 2)
    @rule(held=consumes(matches))
    def pin(self, held):
        match, token_ids, namespace = held
        is_stale = match.node.is_stale
        self.cache.pin(match)
        if not is_stale:
            self.pinned.append((namespace, token_ids[: match.num_tokens]))

    @rule(count=st.integers(0, 30))
    def evict(self, count):
        used = self.cache.num_used
        freed = self.cache.evict(count)
        assert freed <= count
        assert self.cache.num_used == used - freed

    @rule(token_ids=contexts, other=contexts, keep=st.integers(0, 5))
    def forget(self, token_ids, other, keep):
        used, cached = self.cache.num_used, self.cache.peek(token_ids)
        of_other = self.cache.peek(other)
        freed = self.cache.forget(token_ids, keep=keep)
        assert self.cache.num_used == used - freed
        assert self.cache.peek(token_ids) == cached - freed >= min(cached, keep)
        pairs = zip(token_ids, other, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if shared is not None and of_other > shared:  # it goes another way, which stays
            assert self.cache.peek(other) == of_other

    @rule()
    def clear(self):
        self.cache.clear()
        self.pinned.clear()
        assert self.cache.num_pinned == 0

    @invariant()
    def adds_up(self):
        self.cache.check_integrity()

    @invariant()
    def pins_hold(self):
        for namespace, token_ids in self.pinned:
            match = self.cache.match(token_ids, namespace)
            assert match.num_tokens == len(token_ids)
            self.cache.release(match)


Radix.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestRadix = Radix.TestCase


def test_a_fork_shares_its_parents_slots():
    cache = make(20)
    first = fill(cache, [1, 2, 3, 4])
    second = fill(cache, [1, 2, 3, 5])
    assert list(second.slots[:3]) == list(first.slots[:3])
    assert cache.num_used == 5


def test_the_oldest_unlocked_leaf_goes_first_from_its_end():
    cache = make(12)
    for context in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]):
        cache.release(fill(cache, context))
    cache.release(cache.match([1, 1, 1, 1]))  # used again: now the youngest
    assert cache.evict(3) == 3

    def cached(context):
        match = cache.match(context)
        cache.release(match)
        return match.num_tokens

    assert [cached([n] * 4) for n in (2, 1, 3)] == [1, 4, 4]
    assert cache.num_evicted == 3


def test_eviction_frees_no_more_than_it_must_and_nothing_in_vain():
    cache = make(10)
    held = fill(cache, [1, 2, 3, 4, 5, 6])
    cache.release(fill(cache, [7, 8, 9]))
    assert cache.allocate(5) is None  # six are locked: not even evicting all others helps
    assert cache.num_used == 9
    slots = cache.allocate(3)
    assert slots is not None
    assert cache.num_used == 6 + 1 + 3
    cache.free(slots)
    cache.release(held)


def test_what_is_forgotten_is_what_nobody_else_has():
    cache = make(20)
    cache.release(fill(cache, [1, 2, 3, 4, 5]))
    held = fill(cache, [1, 2, 9])
    assert cache.forget([1, 2, 3, 4, 5, 6], keep=4) == 1
    assert cache.forget([1, 2, 3, 4, 5, 6]) == 2
    assert cache.forget([1, 2, 9]) == 0  # locked
    cache.release(held)
    assert cache.forget([1, 2, 9], namespace="adapter") == 0
    assert cache.forget([1, 2, 9]) == 3
    assert cache.num_used == cache.num_evicted == 0
    cache.check_integrity()


def test_a_lone_particle_stays_one_node_however_far_it_goes():
    cache = make(2000)
    match = cache.match([0])
    for length in range(1, 1001):
        longer = cache.match(list(range(length)))
        cache.release(match)
        slots = cache.allocate(length - longer.num_tokens)
        match = cache.insert(longer, list(range(longer.num_tokens, length)), slots)
    assert cache._num_nodes <= 2
    assert len(match.slots) == 1000
    cache.check_integrity()


def test_two_queries_that_computed_the_same_token_keep_one_slot():
    cache = make(10)
    cache.release(fill(cache, [1, 2]))
    first, second = cache.match([1, 2]), cache.match([1, 2])
    one, two = cache.allocate(2), cache.allocate(2)
    first = cache.insert(first, [3, 4], one)
    second = cache.insert(second, [3, 5], two)
    assert cache.num_used == 5
    assert second.slots[2] == first.slots[2] == one[0]
    cache.check_integrity()


def test_clearing_under_a_lock_frees_on_release():
    cache = make(10)
    match = fill(cache, [1, 2, 3])
    cache.release(fill(cache, [1, 2, 9, 9]))
    cache.clear()
    assert cache.num_used == 3  # only what the match uses
    slots = cache.allocate(2)
    assert cache.insert(match, [4, 5], slots) is match  # not kept: it was cleared
    assert cache.match([1, 2, 3]).num_tokens == 0
    cache.release(match)
    assert cache.num_used == 0
    cache.check_integrity()


def test_misuse_is_noticed():
    cache = make(10)
    match = cache.match([1])
    cache.release(match)
    with pytest.raises(CacheError, match="released"):
        cache.insert(match, [1], cache.allocate(1))
    with pytest.raises(CacheError, match="2 tokens for 1 slots"):
        cache.insert(cache.match([1]), [1, 2], [1])


def test_integrity_really_counts():
    cache = make(10)
    match = fill(cache, [1, 2, 3])
    match.node.num_locks += 1
    with pytest.raises(CacheError, match="lock"):
        cache.check_integrity()
    match.node.num_locks -= 1
    lost = match.node.slots.pop()
    match.node.tokens.pop()
    with pytest.raises(CacheError, match="have an owner"):
        cache.check_integrity()
    cache.check_integrity([lost])
    with pytest.raises(CacheError, match="more than one owner"):
        cache.check_integrity([lost, match.node.slots[0]])


def test_the_heap_of_leaves_does_not_grow_with_use():
    cache = make(50)
    for _ in range(5000):
        cache.release(fill(cache, [1, 2, 3]))
    assert len(cache._evictable) < 200


def test_the_null_cache_keeps_the_protocol():
    cache = NullPrefixCache()
    match = cache.match([1, 2, 3])
    assert (match.num_tokens, cache.allocate(0), cache.allocate(1)) == (0, [], None)
    assert cache.insert(match, [1], []) is match
    cache.pin(match)
    cache.release(match)
    cache.free([])
    cache.clear()
    cache.check_integrity()
    assert (cache.evict(5), cache.num_slots, cache.num_used, cache.num_pinned) == (0, 0, 0, 0)
