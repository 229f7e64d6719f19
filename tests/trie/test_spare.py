"""Memory of rows comes back once nobody sees it any more, and never before."""

import gc
import threading

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from genlm_backend import TokenCharacterTrie
from genlm_backend.trie.spare import SpareRows

LENGTH, MAX_ROWS = 8, 3


class Rows(RuleBasedStateMachine):
    """Rows taken, kept, sliced and dropped in any order: none is ever handed out twice."""

    def __init__(self):
        super().__init__()
        self.spare = SpareRows(LENGTH, MAX_ROWS * LENGTH * 8)
        self.held = []
        self.count = 0

    @rule(view=st.booleans())
    def take(self, view):
        row = self.spare.take(np.dtype(np.float64))
        self.count += 1
        row[:] = self.count
        self.held.append((row[2:5] if view else row, self.count))

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
    def no_more_is_kept_than_allowed(self):
        assert self.spare.num_bytes <= MAX_ROWS * LENGTH * 8


Rows.TestCase.settings = settings(max_examples=60, deadline=None)
TestRows = Rows.TestCase


def test_memory_is_used_again():
    spare = SpareRows(LENGTH, 1000)
    row = spare.take(np.dtype(np.float32))
    address = row.ctypes.data
    assert spare.num_bytes == 0
    del row
    assert spare.num_bytes == 4 * LENGTH
    assert spare.take(np.dtype(np.float64)).ctypes.data != address
    assert spare.take(np.dtype(np.float32)).ctypes.data == address


def test_rows_may_be_dropped_on_other_threads():
    spare = SpareRows(LENGTH, 1 << 20)
    rows = [spare.take(np.dtype(np.float32)) for _ in range(100)]
    parts = [rows[i::4] for i in range(4)]
    del rows
    threads = [threading.Thread(target=part.clear) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert spare.num_bytes == 100 * 4 * LENGTH


def test_a_trie_keeps_no_more_than_it_may_and_gives_it_back():
    decode = [bytes([a, b]) for a in range(30) for b in range(30)]
    ws = np.ones(len(decode), np.float32)
    trie = TokenCharacterTrie(decode, spare_bytes=8 * 4 * 2000)
    rows = trie.evaluate_rows("sum", [ws] * 20)
    del rows
    gc.collect()
    assert 0 < trie._spare.num_bytes <= 8 * 4 * 2000
    trie.release()
    assert trie._spare.num_bytes == 0
    none = TokenCharacterTrie(decode, spare_bytes=0)
    none.weight_sum(ws)
    assert none._spare.num_bytes == 0
