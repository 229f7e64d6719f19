"""Which sequences rows go on in: against a model of llama.cpp's cells, by random histories."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.backends.llama_cpp import sequences as module
from genlm_backend.backends.llama_cpp.sequences import (
    Compact,
    Copy,
    Cut,
    Discard,
    OutOfSequencesError,
    Park,
    Sequences,
    Unpark,
)
from genlm_backend.prefix import PrefixTree, Slots

LENGTH, NUM_SLOTS = 12, 60


@pytest.fixture(autouse=True, scope="module")
def _impatient():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEWEST_IDLE", 2)
        patch.setattr(module, "_ROWS_OF_MOVE", 3)
        patch.setattr(module, "_ROWS_OF_LOOK", 2)
        yield


class Cells:
    """What llama.cpp does: a set of sequences for each cell, one cell for each token computed.

    Where there is a window, it saves those tokens alone that are in it behind the last one, be it
    one that slides or a stretch of the text.
    """

    def __init__(self, window=0):
        self.window = window
        self.cells = []  # of (token, position, sequences)
        self.parked = {}  # number -> cells

    def do(self, steps):
        for step in steps:
            span = range(step.start, step.stop) if isinstance(step, Copy) else ()
            if isinstance(step, Copy):
                assert not any(step.sequence in own and at in span for _, at, own in self.cells)
                for _, position, own in self.cells:
                    if position in span and step.source in own:
                        own.add(step.sequence)
            elif isinstance(step, Cut):
                for _, position, own in self.cells:
                    if step.start <= position and (position < step.stop or step.stop < 0):
                        own.discard(step.sequence)
            elif isinstance(step, Park):
                start, stop, sequences = step.chain
                assert self.is_saved(start, stop)
                own = [cell for cell in self.cells if cell[2] & set(sequences) and cell[1] >= start]
                assert sorted(position for _, position, _ in own) == [*range(start, stop)]
                assert all(found == set(sequences) for _, _, found in own)
                self.parked[step.number] = own
                self.cells = [cell for cell in self.cells if not any(cell is one for one in own)]
            elif isinstance(step, Unpark):
                for token, position, own in self.parked.pop(step.number):
                    assert set(step.stops) <= own
                    kept = {i for i, stop in step.stops.items() if position < stop}
                    self.cells.append((token, position, kept))
            elif isinstance(step, Discard):
                del self.parked[step.number]
            else:
                assert isinstance(step, Compact)
                assert all(self.is_saved(start, stop) for start, stop, _ in step.chains)
                found = [
                    (position, frozenset(sequences))
                    for start, stop, sequences in step.chains
                    for position in range(start, stop)
                ]
                expected = [(position, frozenset(own)) for _, position, own in self.cells]
                assert Counter(found) == Counter(expected)
        self.cells = [cell for cell in self.cells if cell[2]]

    def is_saved(self, start, stop):
        return not self.window or start // self.window == (stop - 1) // self.window

    def tokens(self, sequence):
        found = sorted((position, token) for token, position, own in self.cells if sequence in own)
        assert [position for position, _ in found] == [*range(len(found))]
        return [token for _, token in found]


class Steps:
    """Contexts of a prefix tree that are computed token by token."""

    def __init__(self, count, window=0):
        self.tree, self.cells = PrefixTree(Slots(NUM_SLOTS)), Cells(window)
        self.sequences = Sequences(count, LENGTH, NUM_SLOTS, self.tree.evict_slots, window)
        self.num_computed = 0

    def step(self, contexts):
        """Compute the last tokens of contexts, and whatever is missing before them."""
        self.tree.begin()
        nodes = [self.tree.match(context[:-1]) for context in contexts]
        depths = [int(self.tree.nodes.depth[node]) for node in nodes]
        missing = [context[depth:] for context, depth in zip(contexts, depths, strict=True)]
        slots = self.tree.allocate(sum(map(len, missing)), nodes)
        if slots is None:
            return False
        stops = np.cumsum([*map(len, missing)])[:-1]
        own = np.split(slots, stops)
        new = [
            self.tree.grow_chain(node, np.array(ids, np.int32), part)
            for node, ids, part in zip(nodes, missing, own, strict=True)
        ]
        try:
            self.settle()
            self.cells.do(self.sequences.release(slots))
            rows, steps = self.sequences.place(
                self.tree.nodes.slot[nodes], np.array(depths, np.int64)
            )
        except BaseException:
            self.tree.drop(np.concatenate(new))
            raise
        self.cells.do(steps)
        for row, context, depth, ids, part in zip(
            rows.tolist(), contexts, depths, missing, own, strict=True
        ):
            assert self.cells.tokens(row) == context[:depth]
            self.sequences.hold(row, part)
            self.cells.cells += [(token, depth + i, {row}) for i, token in enumerate(ids)]
            self.num_computed += len(ids)
        self.tree.link(np.concatenate(new))
        self.check()
        return True

    def settle(self):
        nodes = self.tree.nodes
        linked = nodes.table[nodes.table > 0]
        is_known = np.isin(np.arange(NUM_SLOTS + 1), nodes.slot[linked])

        def path_to(slot):
            (node,) = linked[nodes.slot[linked] == slot]
            return nodes.slot[nodes.path(int(node))]

        self.cells.do(self.sequences.settle(is_known, path_to))
        self.cells.do(self.sequences.tidy())

    def check(self):
        self.tree.check_integrity()
        sequences = self.sequences
        assert sequences.num_cells == len(self.cells.cells) <= NUM_SLOTS
        assert len(sequences.held()) == sequences.num_held <= NUM_SLOTS
        num_parked = 0
        for number, own in self.cells.parked.items():
            stacks = sequences._parked.values()
            (parked, *_) = [one for stack in stacks for one in stack if one.number == number]
            stop = min(parked.stop, max(int(sequences.sizes[i]) for i in parked.sequences))
            assert [position for _, position, _ in own] == [*range(parked.start, parked.stop)]
            num_parked += stop - parked.start
        assert sequences.num_cells + num_parked == sequences.num_held
        held = set(self.sequences.held().tolist())
        assert held.issuperset(set(self.tree.nodes.slot[self.tree.nodes.slot > 0].tolist()))


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


@settings(max_examples=100, deadline=None)
@given(histories(), st.sampled_from([4, 5, 8, 30]), st.sampled_from([0, 1, 4]))
def test_each_row_goes_on_in_a_sequence_that_holds_its_context(batches, count, window):
    steps = Steps(count, window)
    for batch in batches:
        assert steps.step(batch)


@settings(max_examples=100, deadline=None)
@given(histories())
def test_what_is_pinned_stays_where_sequences_are_few(batches):
    steps = Steps(5)
    assert steps.step([[9, 9, 9, 9]])
    steps.tree.pin(steps.tree.match([9, 9, 9, 9]))
    for batch in batches:
        assert steps.step(batch)
        assert steps.tree.num_cached([9, 9, 9, 9]) == 4


def test_more_contexts_of_one_batch_than_sequences_are_refused():
    steps = Steps(2)
    with pytest.raises(OutOfSequencesError):
        steps.step([[0, 1], [1, 1], [2, 1]])
    steps.check()


def test_a_step_of_particles_computes_each_token_once():
    steps = Steps(40)
    particles = [[5, 6, 7]]
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


def test_tokens_that_are_in_several_sequences_take_one_cell():
    steps = Steps(8)
    steps.step([[1, 2, 3]])
    steps.step([[1, 2, 3, i] for i in range(5)])
    assert steps.sequences.num_held == 8
    assert (steps.sequences.sizes == 4).sum() == 5
