"""The sequences in which rows go on: against a model of llama.cpp's cells, by random histories."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.backends.llama_cpp.sequences import Sequences
from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.prefix.slot_allocator import SlotAllocator

LENGTH, NUM_SLOTS = 12, 60


class Cells:
    """What llama.cpp does: a set of sequences for each cell, one cell for each token computed."""

    def __init__(self, count, window=0):
        self.model = SimpleNamespace(window=window, has_states=False)
        self.size = SimpleNamespace(sequences=SimpleNamespace(num_contexts=count))
        self.cells = []  # of (token, position, sequences)

    def copy(self, source, sequence, size):
        assert not any(sequence in own for _, _, own in self.cells)
        for _, position, own in self.cells:
            if position < size and source in own:
                own.add(sequence)

    def cut(self, sequence, size):
        for _, position, own in self.cells:
            if position >= size:
                own.discard(sequence)
        self.cells = [cell for cell in self.cells if cell[2]]

    def first_position(self, sequence):
        return min((at for _, at, own in self.cells if sequence in own), default=-1)

    def tokens(self, sequence):
        """The last tokens of a sequence, of which none is missing in between."""
        found = sorted((position, token) for token, position, own in self.cells if sequence in own)
        assert [at for at, _ in found] == [*range(found[-1][0] + 1 if found else 0)][-len(found) :]
        return [token for _, token in found]

    def reuse(self):
        """Give the cells before a window to others, and what a sequence has before these."""
        last, lost = {}, {}
        for _, position, own in self.cells:
            for sequence in own:
                last[sequence] = max(position, last.get(sequence, 0))
        for _, position, own in self.cells:
            if len(own) == 1 and position <= last[min(own)] + 1 - self.model.window:
                lost[min(own)] = max(position, lost.get(min(own), 0))
        for _, position, own in self.cells:
            own -= {sequence for sequence in own if position <= lost.get(sequence, -1)}
        self.cells = [cell for cell in self.cells if cell[2]]


class Steps:
    """Contexts of a prefix tree that are computed token by token."""

    def __init__(self, count, window=0):
        self.tree, self.cells = PrefixTree(SlotAllocator(NUM_SLOTS)), Cells(count, window)
        self.sequences = Sequences(self.cells, LENGTH, NUM_SLOTS, self.compute)
        self.num_computed = 0

    def compute(self, sequence, start, tokens):
        self.cells.cells += [(int(t), start + i, {sequence}) for i, t in enumerate(tokens)]
        self.num_computed += len(tokens)

    def step(self, contexts):
        """Compute the last tokens of contexts, and whatever is missing before them."""
        tree, nodes = self.tree, self.tree.nodes
        tree.new_step()
        ends = [tree.match(context[:-1]) for context in contexts]
        missing = [one[nodes.depth[end] :] for one, end in zip(contexts, ends, strict=True)]
        slots = tree.allocate(sum(map(len, missing)), ends)
        own = np.split(slots, np.cumsum([*map(len, missing)])[:-1])
        new = [
            tree.append(end, np.array(ids, np.int32), part)
            for end, ids, part in zip(ends, missing, own, strict=True)
        ]
        self.sequences.release(slots)
        rows = self.sequences.place(nodes, np.array(ends))
        assert len({*rows.tolist()}) == len(contexts)
        for row, context, ids in zip(rows.tolist(), contexts, missing, strict=True):
            depth, window = len(context) - len(ids), self.cells.model.window
            found = self.cells.tokens(row)
            assert found == context[depth - len(found) : depth]
            assert len(found) == depth or 0 <= window - 1 <= len(found)
            self.compute(row, depth, ids)
        self.sequences.hold(rows, own)
        tree.insert(np.concatenate(new))
        if self.cells.model.window:
            self.cells.reuse()


@st.composite
def histories(draw):
    """Batches of contexts, of which many go on from those before them."""
    contexts, batches = [[0]], []
    for _ in range(draw(st.integers(1, 12))):
        batch = []
        for _ in range(draw(st.integers(1, 4))):
            start = draw(st.sampled_from(contexts))
            start = start[: draw(st.integers(1, len(start)))]
            more = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
            batch.append([*start, *more][:LENGTH])
        unique = [list(one) for one in dict.fromkeys(map(tuple, batch))]
        batches.append(unique)
        contexts += unique
    return batches


@settings(max_examples=200, deadline=None)
@given(histories(), st.sampled_from([4, 5, 8, 30]), st.sampled_from([0, 1, 4]), st.booleans())
def test_each_row_continues_in_a_sequence_holding_its_context(batches, count, window, drops):
    steps = Steps(count, window)
    for batch in batches:
        steps.step(batch)
        if drops:
            steps.sequences.drop_idle()


@settings(max_examples=100, deadline=None)
@given(histories())
def test_pinned_tokens_stay_cached_when_sequences_are_few(batches):
    steps = Steps(5)
    steps.step([[9, 9, 9, 9]])
    steps.sequences.pin(steps.tree.nodes, steps.tree.match([9, 9, 9, 9]))
    for batch in batches:
        steps.step(batch)
        assert [9, 9, 9, 9] in [steps.cells.tokens(i) for i in range(5)]


def test_evicted_idle_tokens_are_recomputed_and_others_computed_once():
    steps = Steps(4)
    steps.step([[1, 2, 3]])
    for i in range(3):
        steps.step([[1, 2, 3, i]])
    assert steps.num_computed == len(steps.cells.cells) == 6
    steps.step([[5, 6], [7, 8]])
    steps.step([[1, 2, 3, 1, 4], [1, 2, 3, 1, 5]])  # of which one token has gone
    assert steps.num_computed == 6 + 4 + 3


@pytest.mark.parametrize("window", [0, 3])
def test_particles_that_fit_compute_every_token_and_evict_none(window):
    steps, particles = Steps(40, window), [[5, 6, 7]]
    steps.step(particles)
    for token in range(4):
        particles = [
            [*particles[i // 2 if token == 2 else 0 if token == 0 else i], i % 3 + token]
            for i in range(20)
        ]
        steps.step([list(one) for one in dict.fromkeys(map(tuple, particles))])
    contexts = {tuple(one[:n]) for one in particles for n in range(1, len(one) + 1)}
    assert steps.num_computed >= len(contexts)
    assert steps.tree.num_evicted == 0
