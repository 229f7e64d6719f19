"""Paths in a tree of tokens: their columns, and how they are read."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.attention.cascade_plan import CascadePlan
from tests.llm.hf.paths_of import Tree, parts_of, read_by_row, rows_in_trees


def plan_of(tree, nodes, num_new=None, few_tokens=384):
    """The plan of rows that end in some nodes, with one new token each."""
    num_new = [1] * len(nodes) if num_new is None else num_new
    return CascadePlan.of(tree.paths(nodes), np.array(num_new), few_tokens)


@settings(max_examples=100, deadline=None)
@given(rows_in_trees(), st.sampled_from([0, 1, 4, 8, 20, 40, 10**6]))
def test_every_token_is_read_once_for_each_row(rows, few_tokens):
    tree, nodes, num_new = rows
    plan = plan_of(tree, nodes, num_new, few_tokens)
    paths = [tree.path(node) for node in nodes]
    expected = [[(i, tree.slot[node]) for i, node in enumerate(path)] for path in paths]
    assert read_by_row(plan, len(nodes)) == expected


@given(rows_in_trees(), st.integers(0, 3))
def test_columns_are_left_padded_slots_of_each_row(rows, wider):
    tree, nodes, _ = rows
    past = tree.paths(nodes)
    own = [[tree.slot[node] for node in tree.path(node)] for node in nodes]
    assert past.num_tokens.tolist() == [len(slots) for slots in own]
    width = max(map(len, own)) + wider
    assert past.columns(width).tolist() == [[0] * (width - len(slots)) + slots for slots in own]


def test_rows_under_different_roots_share_nothing():
    tree = Tree()
    other = tree.add(0, 9)
    tree.depth[other] = 0  # another root
    ends = [tree.add(root, slot) for root, slot in ((0, 4), (other, 5), (0, 4))]
    plan = plan_of(tree, ends[:2], few_tokens=0)
    assert parts_of(plan) == [([0], [4], [0]), ([0], [5], [1])]


def test_shared_lineage_with_dead_branches_is_one_part():
    tree, node = Tree(), 0
    for i in range(2000):
        node = tree.add(node, 2 * i + 1)
        tree.add(node, 2 * i + 2)  # nobody goes on there
    ends = [tree.add(node, 5000 + 2 * i) for i in range(32)]
    (part,) = plan_of(tree, ends).prefixes
    assert part.slots.tolist() == [*range(1, 4000, 2)]
    assert part.rows.tolist() == [*range(32)]


def test_rows_without_anything_cached_have_no_columns():
    plan = plan_of(Tree(), [0, 0])
    assert not plan.prefixes
    assert plan.suffix.shape == (2, 2, 0)


# -------------------------------------------------------------------- the next step


@settings(max_examples=100, deadline=None)
@given(
    rows_in_trees(num_new=(1,)),
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=9), max_size=6),
    st.sampled_from([0, 1, 4, 20, 10**6]),
    st.integers(0, 99),
)
def test_advanced_plan_reads_same_tokens_as_new_plan(rows, picks, few_tokens, seed):
    tree, nodes, _ = rows
    plan = plan_of(tree, nodes, few_tokens=few_tokens)
    slots = iter(random.Random(seed).sample(range(1000, 2000), 1000))
    origins, repeated = [*range(len(nodes))], 0
    for step, pick in enumerate(picks):
        computed = [tree.add(node, next(slots)) for node in nodes]
        before = [i % len(nodes) for i in pick]
        nodes = [computed[i] for i in before]
        made = plan
        rows, added = np.array(before), np.array([tree.slot[node] for node in nodes])
        plan = made.advanced(rows, added)
        anew = plan_of(tree, nodes, few_tokens=few_tokens)
        assert read_by_row(plan, len(nodes)) == read_by_row(anew, len(nodes))
        assert plan.prefix_lens.tolist() == anew.prefix_lens.tolist()
        assert plan.suffix.shape == (2, len(nodes), made.suffix.shape[2] + 1)
        kept = [id(part.slots) for part in made.prefixes]
        assert {id(part.slots) for part in plan.prefixes} <= {*kept}  # the same arrays
        origins = [origins[i] for i in before]
        repeated += (len(origins) - len({*origins})) * (plan.suffix.shape[2] - step - 1)
        assert plan.num_repeated == repeated


def test_advancing_keeps_shared_prefix_and_drops_unused_ones():
    tree, node = Tree(), 0
    for i in range(10):
        node = tree.add(node, i + 1)
    ends = [node, node, node, node]
    for i in range(10):
        ends[2] = tree.add(ends[2], 20 + i)
    ends[3] = ends[2]
    plan = plan_of(tree, ends, few_tokens=10)
    assert [part.rows.tolist() for part in plan.prefixes] == [[0, 1, 2, 3], [2, 3]]
    other = plan.advanced(np.array([3, 0, 2, 3, 1]), np.arange(50, 55))
    assert [part.rows.tolist() for part in other.prefixes] == [[0, 1, 2, 3, 4], [0, 2, 3]]
    (part,) = other.advanced(np.array([1, 4]), np.arange(60, 62)).prefixes
    assert part.rows.tolist() == [0, 1]


def test_plan_becomes_stale_as_suffix_grows_or_rows_repeat():
    tree = Tree()
    ends = [0, 0, 0, 0]
    for i in range(100):
        ends = [tree.add(node, 4 * i + j + 1) for j, node in enumerate(ends)]
    plan = made = plan_of(tree, ends)
    everybody = np.arange(4)
    for i in range(100):
        assert not plan.is_stale
        plan = plan.advanced(everybody, 1000 + 4 * i + everybody)
    assert not plan.is_stale
    assert plan.advanced(everybody, 2000 + everybody).is_stale
    # Three rows too many of 100 tokens, where 400 tokens have been read to make it.
    one = made.advanced(np.zeros(4, np.int64), np.full(4, 600))
    assert not one.is_stale
    assert one.advanced(everybody, 700 + everybody).is_stale
    empty = plan_of(Tree(), [0])
    for i in range(64):
        empty = empty.advanced(everybody[:1], np.array([i]))
        assert not empty.is_stale
    assert empty.advanced(everybody[:1], np.array([9])).is_stale
