"""Memory of rows comes back once nobody sees it any more, and never before."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from genlm_backend.runtime.spare_memory import SpareMemory

LENGTH, MAX_ROWS = 8, 3


class Rows(RuleBasedStateMachine):
    """Rows taken, kept, sliced and dropped in any order: none is ever handed out twice."""

    def __init__(self):
        super().__init__()
        self.spare = SpareMemory(MAX_ROWS * LENGTH * 8)
        self.held = []
        self.count = 0

    @rule(view=st.booleans(), shape=st.sampled_from([(LENGTH,), (1, LENGTH), (5,), (2, 5)]))
    def take(self, view, shape):
        row = self.spare.take_array(shape, np.float64)
        assert row.shape == shape
        self.count += 1
        row[:] = self.count
        self.held.append((row[..., 2:5] if view else row, self.count))

    @rule(position=st.integers(0, 9))
    def drop(self, position):
        if position < len(self.held):
            del self.held[position]

    @rule()
    def clear(self):
        self.spare.clear()
        assert self.spare.num_bytes == 0

    @invariant()
    def what_is_held_keeps_its_contents(self):
        for row, value in self.held:
            assert (row == value).all()

    @invariant()
    def the_count_of_bytes_is_that_of_the_arrays(self):
        assert all(self.spare._unused.values())  # no key without an array
        arrays = [array for unused in self.spare._unused.values() for array in unused]
        assert self.spare.num_bytes == sum(array.nbytes for array in arrays)

    @invariant()
    def no_more_is_kept_than_allowed(self):
        assert self.spare.num_bytes <= MAX_ROWS * LENGTH * 8


Rows.TestCase.settings = settings(max_examples=60, deadline=None)
TestRows = Rows.TestCase


def test_row_freed_while_the_lock_is_held_is_not_kept():
    spare = SpareMemory(1000)
    row = spare.take_array((LENGTH,), np.float32)
    with spare._lock:  # as the garbage collector may, in the middle of take()
        del row
    assert spare.num_bytes == 0
    assert spare.take_array((0, 3), np.float32).shape == (0, 3)
