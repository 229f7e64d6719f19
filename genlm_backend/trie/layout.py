"""TrieLayout: a vocabulary's trie as a few flat arrays, built and numbered once.

A *run* is a longest chain of nodes with one child each, with the leaf or the branching node that
it ends in; a run that ends in a branching node is a *branch*. All nodes of a run have the same
tokens beneath them, hence the same weights, so that only branches have to be computed: 60,000 in
a vocabulary of 130,000 tokens and 400,000 nodes.

Runs are numbered breadth-first from the deepest level up, alphabetically within a level, and the
nodes of a run are numbered one after another from its bottom up. Hence children come before
parents, the root is the last node, and the children of run 0, 1, 2, … follow one another without
gaps. The vocabulary a, abc, b::

    node 7, the root                  run 4: [7]
    ├─ a: node 4                      run 2: [4]
    │  ├─ leaf of a: node 0           run 0: [0]
    │  └─ b: node 3 ─ c: node 2
    │           ─ leaf of abc: node 1 run 1: [1, 2, 3]
    └─ b: node 6 ─ leaf of b: node 5  run 3: [5, 6]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import VocabularyError, VocabularyTypeError
from genlm_backend.tokenization import Token
from genlm_backend.trie.compiled import compiled

Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TrieLayout:
    """The trie of a vocabulary, without a Python object per node.

    Attributes:
        alphabet: Letter of each code, or ``None`` where a code is the letter (a byte).
        codes: Code of the letter on the edge into each node, ``[num_nodes]``; no meaning at
            leaves and at the root.
        run_start: First (deepest) node of each run, and ``num_nodes``; int32 ``[num_runs + 1]``.
        run_parent: Run whose bottom branches into this one, for each run but the last; int32
            ``[num_runs - 1]``, never decreasing.
        run_children: First child run of each run, and the end; int32 ``[num_runs + 1]``.
        sorted_tokens: Positions in the vocabulary in alphabetical order, int32 ``[num_tokens]``.
        leaf_tokens: Positions in the vocabulary by their leaf's number, int32 ``[num_tokens]``.
        leaf_runs: The runs of these leaves, ascending, int32 ``[num_tokens]``.
        leaf_parents: The branches that these leaves hang at, int32 ``[num_tokens]``.
        branch_runs: The run of each branch, ascending, int32 ``[num_branches]``.
        branch_parents: The branch that each branch hangs at, int32 ``[num_branches]``; larger
            than its own number. ``num_branches`` where there is none, as for leaves.
        node_sources: For each node the leaf (by its place in ``leaf_tokens``) whose run it is
            in, or ``num_tokens`` plus the branch; int32 ``[num_nodes]``.
    """

    alphabet: list[Any] | None
    codes: NDArray[np.unsignedinteger]
    run_start: Int32
    run_parent: Int32
    run_children: Int32
    sorted_tokens: Int32
    leaf_tokens: Int32
    leaf_runs: Int32
    leaf_parents: Int32
    branch_runs: Int32
    branch_parents: Int32
    node_sources: Int32

    @property
    def num_nodes(self) -> int:
        """Of the trie: prefixes, the root among them, and a leaf for each token."""
        return len(self.node_sources)

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary."""
        return len(self.leaf_tokens)

    @property
    def num_branches(self) -> int:
        """Of runs that end in a branching node; the others end in a leaf."""
        return len(self.branch_runs)

    @property
    def sweep_arrays(self) -> tuple[NDArray[np.uint32], ...]:
        """What the functions of ``sweep.py`` take after weights, results and scratch.

        Unsigned, because compiled code then has no negative index to think of.
        """
        arrays = (self.leaf_tokens, self.leaf_parents, self.branch_parents, self.node_sources)
        return tuple(array.view(np.uint32) for array in arrays)

    def leaves(self) -> Int32:
        """Return the leaf of each token by its position, int32 ``[num_tokens]``."""
        leaves = np.empty(self.num_tokens, np.int32)
        leaves[self.leaf_tokens] = self.run_start[self.leaf_runs]
        return leaves

    def run(self, node: int) -> int:
        """Return the run of ``node``."""
        source = int(self.node_sources[node])
        if source < self.num_tokens:
            return int(self.leaf_runs[source])
        return int(self.branch_runs[source - self.num_tokens])

    def is_leaf(self, node: int) -> bool:
        """Whether ``node`` stands for a whole token."""
        source = int(self.node_sources[node])
        return source < self.num_tokens and node == self.run_start[self.leaf_runs[source]]

    def letter(self, node: int) -> Any:
        """Return the letter on the edge into ``node``, which is neither a leaf nor the root."""
        code = int(self.codes[node])
        return code if self.alphabet is None else self.alphabet[code]

    def parent(self, node: int) -> int:
        """Return the parent of ``node``, which is not the root."""
        run = self.run(node)
        if node + 1 < self.run_start[run + 1]:
            return node + 1
        return int(self.run_start[self.run_parent[run]])

    def children(self, node: int) -> range | list[int]:
        """Return the children of ``node``: its leaves, then the others in alphabetical order."""
        run = self.run(node)
        if node > self.run_start[run]:
            return range(node - 1, node)
        first, end = self.run_children[run], self.run_children[run + 1]
        return (self.run_start[first + 1 : end + 1] - 1).tolist()


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
    if all(isinstance(item, bytes) for item in decode):
        words = [bytes(item) for item in decode]  # a Token is ordered by its id
        alphabet, width = None, 1
    else:
        words, alphabet = _encode(decode)
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
    arrays = _build(codes, lengths, np.array(order, np.int32))
    return TrieLayout(alphabet, *arrays)


def _encode(decode: Iterable[Any]) -> tuple[list[bytes], list[Any]]:
    """Spell each entry in four-byte codes, whose order as bytes is that of the codes.

    Letters are numbered as they come, after the bytes, so that a byte is its own code.
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
    """Return what each entry is known by: ``(bytes, token_id)``, or the entry itself."""
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


@compiled
def _build(codes, lengths, order):
    """Return the arrays of a TrieLayout for words in alphabetical order.

    Args:
        codes: The letters of all words, one word after another.
        lengths: Of the words.
        order: Position of each word in the vocabulary.
    """
    num_words = len(lengths)
    # How many letters each word shares with the one before it, hence how many nodes it adds.
    shared = np.zeros(num_words, np.int64)
    num_nodes = 1
    longest = 0
    start = 0
    for k in range(num_words):
        if k > 0:
            before = start - lengths[k - 1]
            limit = min(lengths[k - 1], lengths[k])
            common = 0
            while common < limit and codes[before + common] == codes[start + common]:
                common += 1
            shared[k] = common
        num_nodes += lengths[k] - shared[k] + 1
        longest = max(longest, lengths[k])
        start += lengths[k]

    # Nodes in preorder, parents before children.
    parent = np.empty(num_nodes, np.int32)
    code = np.zeros(num_nodes, codes.dtype)
    num_children = np.zeros(num_nodes, np.int32)
    last_child = np.zeros(num_nodes, np.int32)
    word_leaf = np.empty(num_words, np.int32)
    path = np.zeros(longest + 1, np.int32)
    parent[0] = -1
    node = 1
    start = 0
    for k in range(num_words):
        for depth in range(shared[k], lengths[k] + 1):
            above = path[depth]
            parent[node] = above
            num_children[above] += 1
            last_child[above] = node
            if depth < lengths[k]:
                code[node] = codes[start + depth]
                path[depth + 1] = node
            else:
                word_leaf[k] = node
            node += 1
        start += lengths[k]

    # Runs, by the node at their bottom: a counting sort by level, the deepest first.
    level = np.zeros(num_nodes, np.int32)
    num_runs = 0
    for node in range(num_nodes):
        if node > 0:
            above = parent[node]
            level[node] = level[above] + (num_children[above] > 1)
        num_runs += num_children[node] != 1
    level_start = np.zeros(level.max() + 2, np.int32)
    for node in range(num_nodes):
        if num_children[node] != 1:
            level_start[level[node]] += 1
    total = 0
    for depth in range(len(level_start) - 1, -1, -1):
        count = level_start[depth]
        level_start[depth] = total
        total += count
    run = np.empty(num_nodes, np.int32)
    run_children = np.zeros(num_runs + 1, np.int32)
    for node in range(num_nodes):
        if num_children[node] != 1:
            r = level_start[level[node]]
            level_start[level[node]] += 1
            run[node] = r
            run_children[r + 1] = num_children[node]
    run_start = np.zeros(num_runs + 1, np.int32)
    for node in range(num_nodes - 1, -1, -1):
        if num_children[node] == 1:
            run[node] = run[last_child[node]]
        run_start[run[node] + 1] += 1
    for r in range(num_runs):
        run_start[r + 1] += run_start[r]
        run_children[r + 1] += run_children[r]

    # Final numbers, children first.
    number = level  # no longer needed
    run_parent = np.empty(num_runs - 1, np.int32)
    node_run = np.empty(num_nodes, np.int32)
    node_code = np.zeros(num_nodes, codes.dtype)
    for node in range(num_nodes - 1, -1, -1):
        if num_children[node] == 1:
            number[node] = number[last_child[node]] + 1
        else:
            number[node] = run_start[run[node]]
        node_run[number[node]] = run[node]
        node_code[number[node]] = code[node]
        if node > 0 and num_children[parent[node]] > 1:
            run_parent[run[node]] = run[parent[node]]

    # Leaves and branches, by the numbers of their runs.
    word_of_run = np.full(num_runs, -1, np.int32)
    for k in range(num_words):
        word_of_run[run[word_leaf[k]]] = k
    num_branches = num_runs - num_words
    source = np.empty(num_runs, np.int32)
    leaf_runs = np.empty(num_words, np.int32)
    leaf_tokens = np.empty(num_words, np.int32)
    branch_runs = np.empty(num_branches, np.int32)
    count = 0
    for r in range(num_runs):
        if word_of_run[r] >= 0:
            source[r] = count
            leaf_runs[count] = r
            leaf_tokens[count] = order[word_of_run[r]]
            count += 1
        else:
            source[r] = num_words + r - count
            branch_runs[r - count] = r
    leaf_parents = np.empty(num_words, np.int32)
    branch_parents = np.empty(num_branches, np.int32)
    for r in range(num_runs):
        above = source[run_parent[r]] - num_words if r < num_runs - 1 else num_branches
        if source[r] < num_words:
            leaf_parents[source[r]] = above
        else:
            branch_parents[source[r] - num_words] = above
    for node in range(num_nodes):
        node_run[node] = source[node_run[node]]
    return (
        node_code,
        run_start,
        run_parent,
        run_children,
        order,
        leaf_tokens,
        leaf_runs,
        leaf_parents,
        branch_runs,
        branch_parents,
        node_run,
    )
