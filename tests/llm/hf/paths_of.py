"""Random trees of tokens, rows that end in them, and the same as spans of runs."""

import itertools
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from genlm_backend.attention import packing
from genlm_backend.attention.packing import pack, pack_step
from genlm_backend.attention.paths import Paths
from tests.llm.hf.plan_of_runs import Run, Span


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
        return Paths(*arrays, np.array(nodes, np.int64))

    def spans(self, nodes, num_new):
        """Return the same as spans, with a run for whatever the same rows have."""
        paths = [self.path(node) for node in nodes]
        readers = {}
        for row, path in enumerate(paths):
            for node in path:
                readers.setdefault(node, []).append(row)
        spans = []
        for path, new in zip(paths, num_new, strict=True):
            chains = [[*own] for _, own in itertools.groupby(path, lambda node: readers[node])]
            runs = [Run(c[0], [self.slot[node] for node in c], len(c)) for c in chains]
            spans.append(Span(new, tuple(runs)))
        return spans


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


def read_by_row(reading, num_rows):
    """Return the sorted pairs of position and slot that each row reads, with repetitions."""
    found = [[] for _ in range(num_rows)]
    for part in reading.parts:
        assert len(part.slots) == len(part.positions) > 0
        assert (np.diff(part.positions) > 0).all()
        assert (np.diff(part.rows) > 0).all()
        for row in part.rows.tolist():
            found[row] += zip(part.positions.tolist(), part.slots.tolist(), strict=True)
    rest = reading.rest
    assert len(rest.slots) == len(rest.positions) == num_rows
    assert not rest.slots[rest.positions < 0].any()
    for row, (positions, slots) in enumerate(zip(rest.positions, rest.slots, strict=True)):
        is_there = positions >= 0
        assert (np.diff(is_there.astype(int)) >= 0).all()  # padded on the left
        assert (np.diff(positions[is_there]) > 0).all()
        found[row] += zip(positions[is_there].tolist(), slots[is_there].tolist(), strict=True)
    return [sorted(pairs) for pairs in found]


def parts_of(reading):
    """Return the parts of a reading as a sorted list."""
    return sorted(
        (part.positions.tolist(), part.slots.tolist(), part.rows.tolist()) for part in reading.parts
    )


class Particles:
    """Rows that grow by a token a step, behind a prompt, in slots of their own.

    ``run`` runs a packed batch and returns the rows at its outputs; ``starts`` are the numbers of
    tokens of the prompt that each row begins with.
    """

    def __init__(self, run, attend, prompt, starts, first_slot=1):
        self.run, self.attend, self.tree = run, attend, Tree()
        slots = range(first_slot, first_slot + len(prompt))
        run(pack([packing.Span(prompt, slots, (0,))]))
        node, self.reading = 0, None
        by_length = [0]
        for slot in slots:
            node = self.tree.add(node, slot)
            by_length.append(node)
        self.nodes = [by_length[size] for size in starts]
        self.contexts = [prompt[:size] for size in starts]
        self.next_slot = slots.stop

    def step(self, token_ids):
        """Compute a token of each row; return the rows behind them."""
        slots = np.arange(len(token_ids)) + self.next_slot
        self.next_slot += len(token_ids)
        past = self.tree.paths(self.nodes)
        if self.reading is None:
            self.reading = self.attend.reading(past, np.ones(len(token_ids), np.int64))
        batch = pack_step(np.array(token_ids), slots, past, self.reading)
        rows = self.run(batch)
        pairs = zip(self.nodes, slots.tolist(), strict=True)
        self.nodes = [self.tree.add(node, slot) for node, slot in pairs]
        pairs = zip(self.contexts, token_ids, strict=True)
        self.contexts = [[*context, token] for context, token in pairs]
        return rows

    def pick(self, rows):
        """Go on from some rows."""
        self.nodes = [self.nodes[row] for row in rows]
        self.contexts = [self.contexts[row] for row in rows]
        if self.reading is not None:
            slots = np.array([self.tree.slot[node] for node in self.nodes])
            self.reading = self.reading.advanced(np.array(rows), slots)
