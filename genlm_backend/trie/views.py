"""Children and prefixes of a trie's nodes, made from its layout when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final, overload

import numpy as np
from numpy.typing import NDArray

from genlm_backend.trie.layout import TrieLayout


@final
class Children(Sequence[dict[Any, int]]):
    """For each node its children: letter → node, made when first asked for and kept.

    A leaf's edge has the letter ``(None, position)``, with the position of its token in the
    vocabulary, so that tokens of equal spelling keep a leaf each.
    """

    def __init__(self, layout: TrieLayout) -> None:
        self._layout = layout
        self._made: dict[int, dict[Any, int]] = {}
        self._token_of_leaf: dict[int, int] | None = None

    def __len__(self) -> int:
        return self._layout.num_nodes

    @overload
    def __getitem__(self, node: int) -> dict[Any, int]: ...
    @overload
    def __getitem__(self, node: slice) -> list[dict[Any, int]]: ...
    def __getitem__(self, node: int | slice) -> dict[Any, int] | list[dict[Any, int]]:
        found = self._made.get(node) if isinstance(node, int) else None
        if found is not None:
            return found
        if isinstance(node, slice):
            return [self[i] for i in range(*node.indices(len(self)))]
        node = range(len(self))[node]  # also what an index may be: negative, or NumPy's
        layout = self._layout
        if self._token_of_leaf is None:
            leaves = layout.run_start[layout.leaf_runs].tolist()
            self._token_of_leaf = dict(zip(leaves, layout.leaf_tokens.tolist(), strict=True))
        children: dict[Any, int] = {}
        for child in layout.children(node):
            token = self._token_of_leaf.get(child)
            children[layout.letter(child) if token is None else (None, token)] = child
        return self._made.setdefault(node, children)

    def __repr__(self) -> str:
        return f"<children of {len(self)} nodes>"


@final
class Jump(Sequence[NDArray[np.int32]]):
    """For each node its children in ascending order, int32 ``[num_children]``; none at a leaf."""

    def __init__(self, layout: TrieLayout) -> None:
        self._layout = layout

    def __len__(self) -> int:
        return self._layout.num_nodes

    @overload
    def __getitem__(self, node: int) -> NDArray[np.int32]: ...
    @overload
    def __getitem__(self, node: slice) -> list[NDArray[np.int32]]: ...
    def __getitem__(self, node: int | slice) -> NDArray[np.int32] | list[NDArray[np.int32]]:
        if isinstance(node, slice):
            return [self[i] for i in range(*node.indices(len(self)))]
        return np.sort(np.array(self._layout.children(range(len(self))[node]), np.int32))

    def __repr__(self) -> str:
        return f"<children of {len(self)} nodes>"


@final
class Prefixes(Mapping[int, list[Any]]):
    """For each node the letters from the root to it, as a list; a leaf has those of its token."""

    def __init__(self, layout: TrieLayout) -> None:
        self._layout = layout

    def __len__(self) -> int:
        return self._layout.num_nodes

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, node: int) -> list[Any]:
        layout = self._layout
        root = layout.num_nodes - 1
        if not 0 <= node <= root:
            raise KeyError(node)
        if node != root and layout.is_leaf(node):
            node = layout.parent(node)
        letters = []
        while node != root:
            letters.append(layout.letter(node))
            node = layout.parent(node)
        return letters[::-1]

    def __repr__(self) -> str:
        return f"<prefixes of {len(self)} nodes>"
