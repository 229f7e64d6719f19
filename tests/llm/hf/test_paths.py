"""Paths in a tree of tokens: their columns, and how they are read."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.llm.hf.attend.sharing import Reading, plan_reading
from tests.llm.hf.paths_of import Tree, parts_of, read_by_row, rows_in_trees


def reading_of(tree, nodes, num_new=None, few_tokens=384):
    """The reading of rows that end in some nodes, with one new token each."""
    num_new = [1] * len(nodes) if num_new is None else num_new
    return Reading.of(tree.paths(nodes), np.array(num_new), few_tokens)


@settings(max_examples=400, deadline=None)
@given(rows_in_trees(), st.sampled_from([0, 1, 4, 8, 20, 40, 10**6]))
def test_every_token_is_read_once_for_each_row_and_together_as_spans_are(rows, few_tokens):
    tree, nodes, num_new = rows
    reading = reading_of(tree, nodes, num_new, few_tokens)
    paths = [tree.path(node) for node in nodes]
    expected = [[(i, tree.slot[node]) for i, node in enumerate(path)] for path in paths]
    assert read_by_row(reading, len(nodes)) == expected
    planned = plan_reading(tree.spans(nodes, num_new), few_tokens)
    assert parts_of(reading) == parts_of(planned)
    ranks = planned.rest.positions.argsort(1)  # its columns are in any order
    for found, wanted in zip(_columns(reading), _columns(planned), strict=True):
        assert found.tolist() == np.take_along_axis(wanted, ranks, 1).tolist()


def _columns(reading):
    return reading.rest.slots, reading.rest.positions


@given(rows_in_trees(), st.integers(0, 3))
def test_columns_are_the_slots_of_each_row_behind_padding(rows, wider):
    tree, nodes, _ = rows
    past = tree.paths(nodes)
    own = [[tree.slot[node] for node in tree.path(node)] for node in nodes]
    assert past.num_tokens.tolist() == [len(slots) for slots in own]
    width = max(map(len, own)) + wider
    assert past.columns(width).tolist() == [[0] * (width - len(slots)) + slots for slots in own]


def test_rows_below_roots_of_their_own_share_nothing():
    tree = Tree()
    other = tree.add(0, 9)
    tree.depth[other] = 0  # another root
    ends = [tree.add(root, slot) for root, slot in ((0, 4), (other, 5), (0, 4))]
    reading = reading_of(tree, ends[:2], few_tokens=0)
    assert parts_of(reading) == [([0], [4], [0]), ([0], [5], [1])]


def test_a_lineage_that_is_forked_at_each_token_is_one_part_as_an_unforked_one():
    tree, node = Tree(), 0
    for i in range(2000):
        node = tree.add(node, 2 * i + 1)
        tree.add(node, 2 * i + 2)  # nobody goes on there
    ends = [tree.add(node, 5000 + 2 * i) for i in range(32)]
    (part,) = reading_of(tree, ends).parts
    assert part.slots.tolist() == [*range(1, 4000, 2)]
    assert part.rows.tolist() == [*range(32)]
    assert not part.is_consecutive


def test_rows_without_anything_cached_have_no_columns():
    reading = reading_of(Tree(), [0, 0])
    assert not reading.parts
    assert reading.rest.slots.shape == (2, 0)
