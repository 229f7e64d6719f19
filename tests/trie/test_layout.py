"""The layout: the same numbers every time, and few bytes."""

import sys
import tracemalloc
from itertools import chain

import numpy as np

from genlm_backend import Token
from genlm_backend.trie.construction import build_layout
from genlm_backend.trie.reachability import RADIX, build_reachability


def test_the_drawing_in_its_docstring():
    layout = build_layout([b"a", b"abc", b"b"])
    assert [layout.parent(node) for node in range(7)] == [4, 2, 3, 4, 7, 6, 7]
    assert layout.run_start.tolist() == [0, 1, 4, 5, 7, 8]
    assert bytes(layout.letter(node) for node in (4, 3, 2, 6)) == b"abcb"
    tokens = [layout.token(node) for node in range(8)]
    assert tokens == [0, 1, None, None, None, 2, None, None]


def test_numbers_depend_on_the_vocabulary_alone():
    rng = np.random.default_rng(0)
    words = sorted({rng.bytes(rng.integers(1, 6)) for _ in range(500)})
    layouts = [build_layout([Token(i, word) for i, word in enumerate(words)]) for _ in range(2)]
    for name in ("codes", "node_sources", "run_start", "run_parent", "leaf_tokens"):
        np.testing.assert_array_equal(*(getattr(layout, name) for layout in layouts))


def test_no_objects_per_node():
    rng = np.random.default_rng(0)
    words = [Token(i, rng.bytes(8)) for i in range(20_000)]
    build_layout(words[:10])
    tracemalloc.start()
    before = sys.getallocatedblocks()
    layout = build_layout(words)
    num_blocks = sys.getallocatedblocks() - before
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert layout.num_nodes > 100_000
    assert num_blocks < 1000
    assert num_bytes < 20 * layout.num_nodes


def test_reachability_says_which_tokens_lie_below_and_has_short_rows():
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(0, 3, rng.integers(0, 7)).tolist()) for _ in range(700)]
    layout = build_layout([Token(i, word) for i, word in enumerate(words)])
    matrix = build_reachability(layout)
    blocks = [[token] for token in layout.sorted_tokens.tolist()]
    level = list(blocks)
    for size in matrix.level_sizes[1:]:
        level = [list(chain(*level[i * RADIX : (i + 1) * RADIX])) for i in range(size)]
        blocks += level
    below = [set() for _ in range(layout.num_nodes)]
    for node in range(layout.num_nodes):
        if (token := layout.token(node)) is not None:
            below[node] = {token}
        else:
            below[node] = set().union(*(below[child] for child in layout.children(node)))
    for node, source in enumerate(matrix.node_sources):
        if source < layout.num_tokens:
            assert below[node] == set(blocks[source])
            continue
        row = source - layout.num_tokens
        columns = matrix.columns[matrix.row_starts[row] : matrix.row_starts[row + 1]]
        assert len(columns) < 2 * RADIX * len(matrix.level_sizes)
        found = [token for column in columns for token in blocks[column]]
        assert len(found) == len(set(found))
        assert below[node] == set(found)
