"""The tree by examples: what is found, evicted, forgotten and refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.errors import CacheError
from genlm_backend.prefix.nodes import NO_HINT, Nodes
from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.prefix.slot_allocator import SlotAllocator
from tests.naive import naive_longest_prefix
from tests.tree_integrity import check_integrity, check_nodes


def make(num_slots):
    return PrefixTree(SlotAllocator(num_slots))


def slots_of(cache, node):
    """One slot for each token up to a node, in order."""
    return cache.nodes.slot[cache.nodes.path(node)].tolist()


def fill(cache, token_ids, namespace=None):
    """Match and link a whole context in a round of its own; return its node."""
    cache.new_step()
    node = cache.match(token_ids, namespace)
    rest = np.array(token_ids[cache.nodes.depth[node] :], np.int32)
    slots = cache.allocate(len(rest))
    assert slots is not None
    return int(cache.insert(cache.append(node, rest, slots))[-1]) if len(rest) else node


def hint_of(cache, node):
    (hint,) = cache.nodes.cache_hints(np.array([node], np.int32))
    return hint


def recalled(cache, hint, token_ids, namespace=None):
    sizes = np.array([len(token_ids)], np.int32)
    (node,) = cache.match_all([hint], namespace, sizes, lambda *_: [])
    return int(cache.nodes.depth[node]), slots_of(cache, cache.match(token_ids, namespace, hint))


def test_cache_hint_stays_valid_while_other_contexts_are_added():
    cache = make(40)
    node = fill(cache, [1, 2, 3, 4])
    hint, own = hint_of(cache, node), slots_of(cache, node)
    longer = slots_of(cache, fill(cache, [1, 2, 3, 4, 5, 6]))
    for other in ([1, 2, 9], [1, 2, 3, 4, 5, 8], [1, 7]):
        fill(cache, other)
        assert recalled(cache, hint, [1, 2, 3, 4, 5, 6, 7]) == (4, longer)
        assert recalled(cache, hint, [1, 2, 3]) == (3, own[:3])
        assert recalled(cache, hint, [1, 2, 3, 4, 9]) == (4, own)
    check_integrity(cache)


def test_cache_hint_is_ignored_after_eviction_and_in_another_tree():
    cache = make(40)
    hint = hint_of(cache, fill(cache, [1, 2, 3, 4]))
    cache.new_step()
    cache.evict(2)
    other = fill(cache, [1, 2, 5, 6, 7])  # in the place of what has gone
    assert recalled(cache, hint, [1, 2, 3, 4]) == (0, slots_of(cache, other)[:2])
    assert recalled(cache, NO_HINT, [1, 2]) == (0, slots_of(cache, other)[:2])
    hint = hint_of(cache, other)
    assert recalled(cache, hint, [1, 2, 5], "adapter") == (0, [])
    assert recalled(make(4), hint, [1, 2, 5]) == (0, [])
    cache.clear()
    assert recalled(cache, hint, [1, 2, 5]) == (0, [])


def test_allocation_evicts_only_as_needed_and_nothing_if_it_fails():
    cache = make(10)
    fill(cache, [7, 8, 9])
    fill(cache, [1, 2, 3, 4, 5, 6])
    assert cache.allocate(5) is None  # six are in use: not even evicting all others helps
    assert cache.slots.num_used == 9
    slots = cache.allocate(3)
    assert cache.slots.num_used == 6 + 1 + 3
    check_integrity(cache, slots.tolist())


def test_a_token_that_was_computed_twice_has_one_slot():
    cache = make(10)
    node = fill(cache, [1, 2])
    first, second = cache.allocate(2), cache.allocate(2)
    chains = [
        cache.append(node, np.array(ids), own) for ids, own in (([3, 4], first), ([3, 5], second))
    ]
    found = cache.insert(np.concatenate(chains)).tolist()
    assert found[0] == found[2]
    assert cache.slots.num_used == 5
    assert slots_of(cache, found[3])[2] == slots_of(cache, found[1])[2] == first[0]
    check_integrity(cache)


def test_clear_frees_pinned_slots_and_is_refused_during_a_fill():
    cache = make(10)
    node = fill(cache, [1, 2, 3])
    fill(cache, [1, 2, 9, 9])
    slots = cache.allocate(1)
    with pytest.raises(CacheError, match="being filled"):
        cache.clear()
    assert cache.num_cached([1, 2, 3]) == 3  # nothing has happened
    cache.slots.free(slots)
    cache.pin(node)
    cache.new_step()
    assert cache.evict(10) == 2
    cache.clear()
    assert (cache.slots.num_used, cache.num_cached([1, 2, 3])) == (0, 0)
    check_integrity(cache)


def test_integrity_check_finds_corrupted_counts_and_slots():
    cache = make(10)
    node = fill(cache, [1, 2, 3])
    cache.nodes.num_children[node] += 1
    with pytest.raises(AssertionError, match="children"):
        check_integrity(cache)
    cache.nodes.num_children[node] -= 1
    slot = cache.nodes.slot[node]
    cache.nodes.slot[node] = 1
    with pytest.raises(AssertionError, match="one owner"):
        check_integrity(cache)
    cache.nodes.slot[node] = slot
    cache.slots.num_used -= 1
    with pytest.raises(AssertionError, match="used slots"):
        check_integrity(cache)
    cache.slots.num_used += 1
    cache.nodes.depth[node] += 1
    with pytest.raises(AssertionError, match="one token longer"):
        check_integrity(cache)
    cache.nodes.depth[node] -= 1
    check_integrity(cache)


def test_tree_without_slots_allocates_and_caches_nothing():
    cache = make(0)
    node = cache.match([1, 2, 3])
    assert (cache.nodes.depth[node], cache.allocate(1), len(cache.allocate(0))) == (0, None, 0)
    assert (cache.evict(5), cache.num_cached([1])) == (0, 0)
    cache.clear()
    check_integrity(cache)
    assert (cache.num_slots, cache.slots.num_used) == (0, 0)


def test_contexts_are_found_after_the_trees_arrays_grow():
    """Places in the arrays and in the table of children, as both grow."""
    cache, random = make(5000), np.random.default_rng(0)
    seen = [()]
    for _ in range(400):
        context = (*seen[random.integers(len(seen))], *random.integers(0, 3, 12).tolist())
        fill(cache, context)
        seen.append(context[:200])
    check_integrity(cache)
    assert all(cache.num_cached(context) == len(context) for context in seen)


PIECES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 63, 64, 65, 130])), min_size=1, max_size=4
)


@given(st.lists(st.tuples(PIECES, st.integers(0, 300), st.integers(0, 150)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_long_contexts_are_found_for_any_numbering_of_nodes(history):
    """Runs of tokens that are compared many at once, beside others, and parted anywhere."""
    nodes, known = Nodes(), []
    root = nodes.new_root()
    for pieces, changed, num_free in history:
        nodes.give_back(np.random.default_rng(num_free).permutation(nodes.take_nodes(num_free)))
        token_ids = [token for token, count in pieces for token in [token] * count]
        if changed < len(token_ids):
            token_ids[changed] = 7
        size = naive_longest_prefix(token_ids, known)
        wanted = np.array(token_ids, np.int32)
        node = nodes.walk(root, wanted)
        path = nodes.path(node)
        assert nodes.token[path].tolist() == token_ids[:size]
        assert (nodes.parent[path[1:]] == path[:-1]).all()
        if size < len(token_ids):
            nodes.insert(nodes.append(node, wanted[size:], np.ones(len(wanted) - size), 1))
        known.append(token_ids)
        check_nodes(nodes, nodes.table[nodes.table > 0])
    prefixes = {tuple(ids[: n + 1]) for ids in known for n in range(len(ids))}
    assert (nodes.table > 0).sum() == len(prefixes)
