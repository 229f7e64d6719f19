"""build_layout: from a vocabulary to the arrays of its trie, in six phases.

The entries are sorted; each is compared with the one before it; what they do not share are the
nodes, in preorder; nodes are gathered in runs, which are numbered from the deepest level up; the
nodes get their numbers by those of their runs; leaves and branches are told apart. Every phase is
linear, but for the sorting, and none is recursive, whatever the length of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import VocabularyError
from genlm_backend.runtime.compiled import compiled
from genlm_backend.trie.entries import spell
from genlm_backend.trie.layout import Int32, TrieLayout


def build_layout(decode: Sequence[Any]) -> TrieLayout:
    """Return the layout of the trie over ``decode``; see ``TokenCharacterTrie``.

    Linear in the letters of the vocabulary, after sorting it. No recursion, whatever the length
    of a token.

    Raises:
        VocabularyError: If ``decode`` is empty or too large for 32-bit numbers.
        VocabularyTypeError: If an entry is no iterable of hashable letters.
    """
    if not decode:
        raise VocabularyError("a trie needs a vocabulary of at least one token; got none")
    words = _sort(decode)
    shared = _shared_lengths(words.codes, words.lengths)
    nodes = _Nodes(*_preorder(words.codes, words.lengths, shared))
    runs = _Runs(*_gather_runs(nodes.parents, nodes.num_children, nodes.last_children))
    numbered = _Numbered(*_number_nodes(*nodes.edges, runs.of_nodes, runs.starts))
    return _tell_leaves_from_branches(words, nodes, runs, numbered)


# -------------------------------------------------------------------- what the phases hand on


@dataclass(frozen=True, eq=False)
class _Words:
    """The entries of a vocabulary in alphabetical order.

    Attributes:
        alphabet: Letter of each code, or ``None`` where a code is the letter (a byte).
        codes: Codes of the letters, one entry after another, ``[num_letters]``.
        lengths: Number of letters of each entry, int64 ``[num_tokens]``.
        order: Position of each entry in the vocabulary, int32 ``[num_tokens]``.
    """

    alphabet: list[Any] | None
    codes: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]
    order: Int32


@dataclass(frozen=True, eq=False)
class _Nodes:
    """The nodes in preorder: the root first, parents before children, alphabetically.

    Attributes:
        parents: Parent of each node, int32 ``[num_nodes]``; -1 for the root.
        codes: Code of the letter on the edge into each node, ``[num_nodes]``.
        num_children: Number of each node's children, int32 ``[num_nodes]``.
        last_children: Last child of each node that has any, int32 ``[num_nodes]``.
        leaves: Leaf of each entry in alphabetical order, int32 ``[num_tokens]``.
    """

    parents: Int32
    codes: NDArray[np.unsignedinteger]
    num_children: Int32
    last_children: Int32
    leaves: Int32

    @property
    def edges(self) -> tuple[NDArray[Any], ...]:
        """The arrays that have an element for each node."""
        return self.parents, self.codes, self.num_children, self.last_children


@dataclass(frozen=True, eq=False)
class _Runs:
    """The runs, numbered from the deepest level up, alphabetically within a level.

    Attributes:
        of_nodes: Run of each node in preorder, int32 ``[num_nodes]``.
        starts: ``run_start`` of the layout.
        children: ``run_children`` of the layout.
    """

    of_nodes: Int32
    starts: Int32
    children: Int32


@dataclass(frozen=True, eq=False)
class _Numbered:
    """The nodes by their final numbers, children before parents.

    Attributes:
        codes: ``codes`` of the layout.
        runs: Run of each node, int32 ``[num_nodes]``.
        run_parents: ``run_parent`` of the layout.
    """

    codes: NDArray[np.unsignedinteger]
    runs: Int32
    run_parents: Int32


# -------------------------------------------------------------------- the phases


def _sort(decode: Sequence[Any]) -> _Words:
    """Sort the entries by the codes of their letters."""
    if all(isinstance(item, bytes) for item in decode):
        words = [bytes(item) for item in decode]  # a Token is ordered by its id
        alphabet, width = None, 1
    else:
        words, alphabet = spell(decode)
        width = 4
    order = sorted(range(len(words)), key=words.__getitem__)
    sorted_words = [words[i] for i in order]
    lengths = np.fromiter(map(len, sorted_words), np.int64, len(words)) // width
    if lengths.sum() + len(words) + 1 > np.iinfo(np.int32).max:
        raise VocabularyError("the vocabulary has too many letters for a trie")
    flat = b"".join(sorted_words)
    if width == 1:
        codes = np.frombuffer(flat, np.uint8)
    else:
        codes = np.frombuffer(flat, ">u4").astype(np.uint32)
    return _Words(alphabet, codes, lengths, np.array(order, np.int32))


@compiled
def _shared_lengths(codes, lengths):
    """Return how many letters each word shares with the one before it, int64 ``[num_tokens]``."""
    shared = np.zeros(len(lengths), np.int64)
    start = 0
    for k in range(1, len(lengths)):
        before = start
        start += lengths[k - 1]
        limit = min(lengths[k - 1], lengths[k])
        common = 0
        while common < limit and codes[before + common] == codes[start + common]:
            common += 1
        shared[k] = common
    return shared


@compiled
def _preorder(codes, lengths, shared):
    """Return the arrays of ``_Nodes``: each word adds its own letters' nodes and a leaf."""
    num_words = len(lengths)
    num_nodes = 1 + (lengths - shared).sum() + num_words
    parents = np.empty(num_nodes, np.int32)
    node_codes = np.zeros(num_nodes, codes.dtype)
    num_children = np.zeros(num_nodes, np.int32)
    last_children = np.zeros(num_nodes, np.int32)
    leaves = np.empty(num_words, np.int32)
    path = np.zeros(lengths.max() + 1, np.int32)  # the nodes from the root to the latest
    parents[0] = -1
    node = 1
    start = 0
    for k in range(num_words):
        for depth in range(shared[k], lengths[k] + 1):
            above = path[depth]
            parents[node] = above
            num_children[above] += 1
            last_children[above] = node
            if depth < lengths[k]:
                node_codes[node] = codes[start + depth]
                path[depth + 1] = node
            else:
                leaves[k] = node
            node += 1
        start += lengths[k]
    return parents, node_codes, num_children, last_children, leaves


@compiled
def _gather_runs(parents, num_children, last_children):
    """Return the arrays of ``_Runs``: a counting sort of the runs' bottoms, by level."""
    num_nodes = len(parents)
    levels = np.zeros(num_nodes, np.int32)
    for node in range(1, num_nodes):
        above = parents[node]
        levels[node] = levels[above] + (num_children[above] > 1)
    next_runs = np.zeros(levels.max() + 1, np.int32)  # the number of the next run of each level
    for node in range(num_nodes):
        if num_children[node] != 1:
            next_runs[levels[node]] += 1
    num_runs = 0
    for level in range(len(next_runs) - 1, -1, -1):
        count = next_runs[level]
        next_runs[level] = num_runs
        num_runs += count

    of_nodes = np.empty(num_nodes, np.int32)
    children = np.zeros(num_runs + 1, np.int32)
    for node in range(num_nodes):
        if num_children[node] != 1:
            run = next_runs[levels[node]]
            next_runs[levels[node]] += 1
            of_nodes[node] = run
            children[run + 1] = num_children[node]
    starts = np.zeros(num_runs + 1, np.int32)
    for node in range(num_nodes - 1, -1, -1):
        if num_children[node] == 1:
            of_nodes[node] = of_nodes[last_children[node]]
        starts[of_nodes[node] + 1] += 1
    for run in range(num_runs):
        starts[run + 1] += starts[run]
        children[run + 1] += children[run]
    return of_nodes, starts, children


@compiled
def _number_nodes(parents, codes, num_children, last_children, runs, starts):
    """Return the arrays of ``_Numbered``: the nodes of a run follow its bottom."""
    num_nodes = len(parents)
    numbers = np.empty(num_nodes, np.int32)
    numbered_codes = np.zeros(num_nodes, codes.dtype)
    numbered_runs = np.empty(num_nodes, np.int32)
    run_parents = np.empty(len(starts) - 2, np.int32)
    for node in range(num_nodes - 1, -1, -1):
        if num_children[node] == 1:
            number = numbers[last_children[node]] + 1
        else:
            number = starts[runs[node]]
        numbers[node] = number
        numbered_codes[number] = codes[node]
        numbered_runs[number] = runs[node]
        if node > 0 and num_children[parents[node]] > 1:
            run_parents[runs[node]] = runs[parents[node]]
    return numbered_codes, numbered_runs, run_parents


def _tell_leaves_from_branches(
    words: _Words, nodes: _Nodes, runs: _Runs, numbered: _Numbered
) -> TrieLayout:
    """Number the runs that end in a leaf, and those that do not, each by themselves."""
    num_runs, num_words = len(runs.starts) - 1, len(words.order)
    num_branches = num_runs - num_words
    tokens = np.full(num_runs, -1, np.int32)
    tokens[runs.of_nodes[nodes.leaves]] = words.order
    leaf_runs = np.flatnonzero(tokens >= 0).astype(np.int32)
    branch_runs = np.flatnonzero(tokens < 0).astype(np.int32)
    sources = np.empty(num_runs, np.int32)
    sources[leaf_runs] = np.arange(num_words)
    sources[branch_runs] = np.arange(num_words, num_runs)
    parents = np.full(num_runs, num_branches, np.int32)
    parents[:-1] = sources[numbered.run_parents] - num_words
    return TrieLayout(
        alphabet=words.alphabet,
        codes=numbered.codes,
        run_start=runs.starts,
        run_parent=numbered.run_parents,
        run_children=runs.children,
        sorted_tokens=words.order,
        leaf_tokens=tokens[leaf_runs],
        leaf_runs=leaf_runs,
        leaf_parents=parents[leaf_runs],
        branch_runs=branch_runs,
        branch_parents=parents[branch_runs],
        node_sources=sources[numbered.runs],
    )
