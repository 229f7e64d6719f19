"""Random trees of tokens, rows that end in them, and the same as spans of runs."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from genlm_backend.attention.cascade_plan import CachedPrefixes


class Tree:
    """A tree that grows: a parent, a depth and a slot for each node; node 0 is the root."""

    def __init__(self):
        self.parent, self.depth, self.slot = [0], [0], [7]

    def add(self, parent, slot):
        """Add a node and return it."""
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.slot.append(slot)
        return len(self.parent) - 1

    def path(self, node):
        """Return the nodes from the first token to a node."""
        found = []
        while self.depth[node]:
            found.append(node)
            node = self.parent[node]
        return found[::-1]

    def paths(self, nodes):
        """Return the paths of rows that end in some nodes."""
        arrays = (np.array(values, np.int32) for values in (self.parent, self.depth, self.slot))
        return CachedPrefixes(*arrays, np.array(nodes, np.int64))


class Rows(NamedTuple):
    """Rows that end in nodes of a tree."""

    tree: Tree
    nodes: list[int]
    num_new: list[int]


@st.composite
def rows_in_trees(draw, num_new=(1, 1, 1, 2, 20)):
    """Stretches of a tree whose slots follow one another but for some, and rows that end in it."""
    tree, next_slot, branches = Tree(), 1, [0]
    for _ in range(draw(st.integers(0, 7))):
        node = draw(st.sampled_from(branches))
        for _ in range(draw(st.integers(1, 20))):
            next_slot += draw(st.sampled_from([1, 1, 1, 1, 1, 2]))
            node = tree.add(node, next_slot)
            branches.append(node)
    size = draw(st.integers(1, 8))
    nodes = draw(st.lists(st.sampled_from(branches), min_size=size, max_size=size))
    new = draw(st.lists(st.sampled_from(num_new), min_size=size, max_size=size))
    return Rows(tree, nodes, new)


def read_by_row(plan, num_rows):
    """Return the sorted pairs of position and slot that each row reads, with repetitions."""
    found = [[] for _ in range(num_rows)]
    for part in plan.prefixes:
        assert len(part.slots) == len(part.positions) > 0
        assert (np.diff(part.positions) > 0).all()
        assert (np.diff(part.rows) > 0).all()
        for row in part.rows.tolist():
            found[row] += zip(part.positions.tolist(), part.slots.tolist(), strict=True)
    all_slots, all_positions = plan.suffix
    assert len(all_slots) == len(all_positions) == num_rows
    assert not all_slots[all_positions < 0].any()
    assert plan.is_padded == (all_positions < 0).any()
    for row, (positions, slots) in enumerate(zip(all_positions, all_slots, strict=True)):
        is_there = positions >= 0
        assert (np.diff(is_there.astype(int)) >= 0).all()  # padded on the left
        assert (np.diff(positions[is_there]) > 0).all()
        found[row] += zip(positions[is_there].tolist(), slots[is_there].tolist(), strict=True)
    return [sorted(pairs) for pairs in found]


def parts_of(plan):
    """Return the parts of a plan as a sorted list."""
    return sorted(
        (part.positions.tolist(), part.slots.tolist(), part.rows.tolist()) for part in plan.prefixes
    )
