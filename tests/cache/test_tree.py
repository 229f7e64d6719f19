"""The tree by examples: what is found, evicted, forgotten and refused."""

from array import array

import pytest

from genlm_backend.cache import PrefixTree, Slots
from genlm_backend.errors import CacheError


def make(num_slots):
    return PrefixTree(Slots(num_slots))


def slots_of(match):
    """One slot for each token of a match, in order."""
    return [slot for run in match.runs() for slot in run.slots[: run.num_tokens]]


def fill(cache, token_ids, namespace=None):
    """Match and insert a whole context; return the match."""
    match = cache.match(token_ids, namespace)
    rest = token_ids[match.num_tokens :]
    slots = cache.allocate(len(rest))
    assert slots is not None
    return cache.insert(match, rest, slots)


def test_a_fork_shares_its_parents_slots():
    cache = make(20)
    first = fill(cache, [1, 2, 3, 4])
    second = fill(cache, [1, 2, 3, 5])
    assert slots_of(second)[:3] == slots_of(first)[:3]
    assert cache.num_used == 5


def recalled(cache, place, token_ids):
    spot = cache.recall(place, None, len(token_ids))
    return spot.num_tokens, slots_of(
        cache.match_from(spot, array("i", token_ids[spot.num_tokens :]))
    )


def test_a_place_stays_where_it_is_while_the_tree_changes_around_it():
    cache = make(40)
    match = fill(cache, [1, 2, 3, 4])
    place, own = cache.place(match), slots_of(match)
    match = cache.insert(match, [5, 6], cache.allocate(2))  # the node grows
    longer = slots_of(match)
    for other in ([1, 2, 9], [1, 2, 3, 4, 5, 8], [1, 7]):  # and is split on both sides
        fill(cache, other)
        assert recalled(cache, place, [1, 2, 3, 4, 5, 6, 7]) == (4, longer)
        assert recalled(cache, place, [1, 2, 3]) == (3, own[:3])
        assert recalled(cache, place, [1, 2, 3, 4, 9]) == (4, own)
    cache.check_integrity()


def test_a_place_is_nothing_once_some_of_its_tokens_have_gone():
    cache = make(40)
    match = fill(cache, [1, 2, 3, 4])
    place = cache.place(match)
    cache.unlock(match)
    cache.evict(2)
    other = fill(cache, [1, 2, 5, 6, 7])  # grows from what is left
    assert recalled(cache, place, [1, 2, 3, 4]) == (0, slots_of(other)[:2])
    assert recalled(cache, None, [1, 2]) == (0, slots_of(other)[:2])
    place = cache.place(other)
    assert cache.recall(place, "adapter", 5).num_tokens == 0
    assert make(4).recall(place, None, 5).num_tokens == 0
    cache = make(40)
    match = fill(cache, [1, 2, 3])
    place = cache.place(match)
    cache.unlock(match)
    cache.clear()
    assert cache.recall(place, None, 3).num_tokens == 0


def test_the_oldest_unlocked_leaf_goes_first_from_its_end():
    cache = make(12)
    for context in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]):
        cache.unlock(fill(cache, context))
    cache.unlock(cache.match([1, 1, 1, 1]))  # used again: now the youngest
    assert cache.evict(3) == 3

    def cached(context):
        match = cache.match(context)
        cache.unlock(match)
        return match.num_tokens

    assert [cached([n] * 4) for n in (2, 1, 3)] == [1, 4, 4]
    assert cache.num_evicted == 3


def test_every_slot_can_be_evicted():
    cache = make(6)
    cache.unlock(fill(cache, [1, 2, 3]))
    cache.unlock(fill(cache, [4, 5, 6]))
    slots = cache.allocate(6)
    assert slots is not None
    assert sorted(slots) == [1, 2, 3, 4, 5, 6]


def test_eviction_frees_no_more_than_it_must_and_nothing_in_vain():
    cache = make(10)
    held = fill(cache, [1, 2, 3, 4, 5, 6])
    cache.unlock(fill(cache, [7, 8, 9]))
    assert cache.allocate(5) is None  # six are locked: not even evicting all others helps
    assert cache.num_used == 9
    slots = cache.allocate(3)
    assert slots is not None
    assert cache.num_used == 6 + 1 + 3
    cache.free(slots)
    cache.unlock(held)


def test_what_is_forgotten_is_what_nobody_else_has():
    cache = make(20)
    cache.unlock(fill(cache, [1, 2, 3, 4, 5]))
    held = fill(cache, [1, 2, 9])
    assert cache.forget([1, 2, 3, 4, 5, 6], keep=4) == 1
    assert cache.forget([1, 2, 3, 4, 5, 6]) == 2
    assert cache.forget([1, 2, 9]) == 0  # locked
    cache.unlock(held)
    assert cache.forget([1, 2, 9], namespace="adapter") == 0
    assert cache.forget([1, 2, 9]) == 3
    assert cache.num_used == cache.num_evicted == 0
    cache.check_integrity()


def test_a_lone_particle_stays_one_node_however_far_it_goes():
    cache = make(2000)
    match = cache.match([0])
    for length in range(1, 1001):
        longer = cache.match(list(range(length)))
        cache.unlock(match)
        slots = cache.allocate(length - longer.num_tokens)
        match = cache.insert(longer, list(range(longer.num_tokens, length)), slots)
    assert cache._edges.num_nodes <= 2
    assert len(slots_of(match)) == 1000
    cache.check_integrity()


def test_two_queries_that_computed_the_same_token_keep_one_slot():
    cache = make(10)
    cache.unlock(fill(cache, [1, 2]))
    first, second = cache.match([1, 2]), cache.match([1, 2])
    one, two = cache.allocate(2), cache.allocate(2)
    first = cache.insert(first, [3, 4], one)
    second = cache.insert(second, [3, 5], two)
    assert cache.num_used == 5
    assert slots_of(second)[2] == slots_of(first)[2] == one[0]
    cache.check_integrity()


def test_contexts_that_share_tokens_share_their_runs():
    """Whoever is matched later may split what another has matched; the runs tell all the same."""
    cache = make(20)
    cache.unlock(fill(cache, [1, 2, 3, 4, 5]))
    first = cache.match([1, 2, 3, 4, 5])
    second = cache.match([1, 2, 3, 9])
    third = cache.match([1, 8])
    runs = [match.runs() for match in (first, second, third)]
    assert [[run.num_tokens for run in own] for own in runs] == [[1, 2, 2], [1, 2], [1]]
    assert len({own[0].owner for own in runs}) == 1
    assert runs[0][1].owner is runs[1][1].owner
    for own in runs:
        for run in own:
            assert len(run.slots) == run.num_tokens


def test_clearing_frees_what_is_pinned_and_leaves_no_match():
    cache = make(10)
    match = fill(cache, [1, 2, 3])
    cache.unlock(fill(cache, [1, 2, 9, 9]))
    with pytest.raises(CacheError, match="locked"):
        cache.clear()
    assert cache.num_cached([1, 2, 3]) == 3  # nothing has happened
    cache.pin(match)
    cache.clear()
    assert (cache.num_used, cache.num_cached([1, 2, 3])) == (0, 0)
    cache.check_integrity()
    fill(cache, [1])
    with pytest.raises(CacheError, match="locked"):  # the pin of before counts no more
        cache.clear()


def test_misuse_is_noticed():
    cache = make(10)
    match = cache.match([1])
    cache.unlock(match)
    with pytest.raises(CacheError, match="unlocked"):
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
    with pytest.raises(CacheError, match="2 slots are used, and not 3"):
        cache.check_integrity()
    cache.slots.num_used -= 1
    with pytest.raises(CacheError, match="have an owner"):
        cache.check_integrity()
    cache.slots.num_used += 1
    cache.check_integrity([lost])
    cache.slots.num_used += 1
    with pytest.raises(CacheError, match="more than one owner"):
        cache.check_integrity([lost, match.node.slots[0]])


def test_the_heap_of_leaves_does_not_grow_with_use():
    cache = make(50)
    for _ in range(5000):
        cache.unlock(fill(cache, [1, 2, 3]))
    assert len(cache._device._leaves) < 200


def test_a_tree_without_slots_keeps_the_protocol():
    cache = make(0)
    match = cache.match([1, 2, 3])
    assert (match.num_tokens, match.runs(), cache.allocate(1)) == (0, (), None)
    assert cache.insert(match, [], []) is match
    cache.unlock(match)
    assert (cache.evict(5), cache.num_cached([1]), cache.forget([1])) == (0, 0, 0)
    cache.clear()
    cache.check_integrity()
    assert (cache.num_slots, cache.num_used) == (0, 0)
