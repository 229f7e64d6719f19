"""build_layout: from a vocabulary to the arrays of its trie, in six phases.

The entries are sorted; each is compared with the one before it; what they do not share are the
nodes, in preorder; nodes are gathered in runs, which are numbered from the deepest level up; the
nodes get their numbers by those of their runs; leaves and branches are told apart. Every phase is
linear, but for the sorting, and none is recursive, whatever the length of a token.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import VocabularyError, VocabularyTypeError
from genlm_backend.runtime.compiled import compiled
from genlm_backend.tokenization import Token
from genlm_backend.trie.layout import Int32, TrieLayout


def build_layout(decode: Sequence[Any]) -> TrieLayout:
    """Return the layout of the trie over ``decode``; see ``TokenCharacterTrie``.

    Linear in the letters of the vocabulary, after sorting it. No recursion, whatever the length
    of a token.
    """
    if not decode:
        raise VocabularyError("a trie needs a vocabulary of at least one token; got none")
    alphabet, letters, lengths, order = _sort(decode)
    shared = _shared_lengths(letters, lengths)
    parents, codes, num_children, last_children, leaves = _preorder(letters, lengths, shared)
    of_nodes, starts, children = _gather_runs(parents, num_children, last_children)
    codes, runs, run_parents = _number_nodes(
        parents, codes, num_children, last_children, of_nodes, starts
    )
    # Runs that end in a leaf, and those that do not, are numbered each by themselves.
    num_words, num_runs = len(order), len(starts) - 1
    tokens = np.full(num_runs, -1, np.int32)
    tokens[of_nodes[leaves]] = order
    leaf_runs = np.flatnonzero(tokens >= 0).astype(np.int32)
    branch_runs = np.flatnonzero(tokens < 0).astype(np.int32)
    sources = np.empty(num_runs, np.int32)
    sources[leaf_runs] = np.arange(num_words)
    sources[branch_runs] = np.arange(num_words, num_runs)
    branch_above = np.full(num_runs, num_runs - num_words, np.int32)
    branch_above[:-1] = sources[run_parents] - num_words
    return TrieLayout(
        alphabet=alphabet,
        codes=codes,
        run_start=starts,
        run_parent=run_parents,
        run_children=children,
        sorted_tokens=order,
        leaf_tokens=tokens[leaf_runs],
        leaf_runs=leaf_runs,
        leaf_parents=branch_above[leaf_runs],
        branch_runs=branch_runs,
        branch_parents=branch_above[branch_runs],
        node_sources=sources[runs],
    )


# -------------------------------------------------------------------- the phases


def _sort(
    decode: Sequence[Any],
) -> tuple[list[Any] | None, NDArray[np.unsignedinteger], NDArray[np.int64], Int32]:
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
    return alphabet, codes, lengths, np.array(order, np.int32)


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
    """Return the nodes in preorder: each word adds its own letters' nodes and a leaf.

    Parent of each (-1 for the root), code of the letter on the edge into it, number of its
    children, and the last of them; and the leaf of each word.
    """
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
    """Return the run of each node in preorder, and ``run_start`` and ``run_children``.

    A counting sort of the runs' bottoms, by level.
    """
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
    """Return codes and runs of the nodes by their final numbers, and ``run_parent``.

    The nodes of a run follow its bottom.
    """
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


# -------------------------------------------------------------------- the entries


def spell(decode: Iterable[Any]) -> tuple[list[bytes], list[Any]]:
    """Return each entry as bytes, four for the code of each letter, and the letter of each code.

    The order of the bytes is that of the codes. Letters are numbered as they come, after the
    bytes, so that a byte is its own code.
    """
    code_of: dict[Hashable, int] = {letter: letter for letter in range(256)}
    words = []
    for position, item in enumerate(decode):
        try:
            codes = [code_of.setdefault(letter, len(code_of)) for letter in item]
        except TypeError as error:
            raise VocabularyTypeError(
                f"decode[{position}] is {item!r}: every entry of a vocabulary is an iterable of "
                f"hashable letters, such as bytes or a string ({error})"
            ) from error
        words.append(np.array(codes, ">u4").tobytes())
    return words, list(code_of)


def keys_of(decode: Iterable[Any]) -> list[Hashable]:
    """Return the key of each entry: ``(bytes, token_id)``, or the entry itself."""
    return [
        (item.byte_string, item.token_id) if isinstance(item, Token) else item for item in decode
    ]


def check_unique(decode: Sequence[Any]) -> None:
    """Raise a ``VocabularyError`` where two entries have the same key."""
    is_ordinary = all(type(item) is Token for item in decode)
    if is_ordinary and len({item.token_id for item in decode}) == len(decode):
        return  # without making a key of each token
    seen: dict[Hashable, int] = {}
    for position, key in enumerate(keys_of(decode)):
        try:
            first = seen.setdefault(key, position)
        except TypeError as error:
            raise VocabularyTypeError(
                f"decode[{position}] is {key!r}, which is not hashable; pass a tuple"
            ) from error
        if first != position:
            raise VocabularyError(
                f"decode[{first}] and decode[{position}] are the same entry, {key!r}; entries "
                f"that spell the same bytes are told apart by their ids, as Tokens"
            )
