"""TrieLayout: a vocabulary's trie as a few flat arrays.

A *run* is a maximal chain of nodes with one child each, including the leaf or branching node at its
end; a run that ends in a branching node is a *branch*. The same tokens lie below all nodes of a
run, so one value per branch is computed: 60,000 for 130,000 tokens and 400,000 nodes. A run's
*level* is the number of branches above it. Runs are numbered from the deepest level up,
alphabetically within a level, and the nodes of a run from its bottom up. So children come before
parents, and the child runs of runs 0, 1, 2, … follow one another. For the vocabulary a, abc, b::

    node 7, the root                  run 4: [7]
    ├─ a: node 4                      run 2: [4]
    │  ├─ leaf of a: node 0           run 0: [0]
    │  └─ b: node 3 ─ c: node 2
    │           ─ leaf of abc: node 1 run 1: [1, 2, 3]
    └─ b: node 6 ─ leaf of b: node 5  run 3: [5, 6]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TrieLayout:
    """The trie of a vocabulary, without a Python object per node."""

    alphabet: list[Any] | None  # the letter of each code; None if letters are bytes
    codes: NDArray[np.unsignedinteger]  # [num_nodes] code of the prefix's last letter, or 0
    run_start: Int32  # [num_runs + 1] first node of each run; then num_nodes
    run_parent: Int32  # [num_runs - 1] run above each run but the root's, which is last
    run_children: Int32  # [num_runs + 1] where the child runs of each run begin; then their number
    sorted_tokens: Int32  # [num_tokens] positions in ``decode``, in alphabetical order
    leaf_tokens: Int32  # [num_tokens] positions in ``decode``, in the order of ``leaf_runs``
    leaf_runs: Int32  # [num_tokens] runs that end in a leaf, ascending
    leaf_parents: Int32  # [num_tokens] index in ``branch_runs`` of the run above each leaf run
    branch_runs: Int32  # [num_branches] runs that end in a branching node, ascending
    branch_parents: Int32  # [num_branches] the same for each branch; num_branches if none is above
    node_sources: Int32  # [num_nodes] index of each node's run in leaf_runs, then branch_runs

    @property
    def num_nodes(self) -> int:
        return len(self.node_sources)

    @property
    def num_tokens(self) -> int:
        return len(self.leaf_tokens)

    @property
    def num_branches(self) -> int:
        """Number of runs that end in a branching node; the other runs end in a leaf."""
        return len(self.branch_runs)

    @property
    def sweep_arrays(self) -> tuple[NDArray[np.uint32], ...]:
        """The last arguments of the sweeps in ``reachability.py``, in order; uint32."""
        arrays = (self.leaf_tokens, self.leaf_parents, self.branch_parents, self.node_sources)
        # Unsigned, so that compiled code does not check for negative indices.
        return tuple(array.view(np.uint32) for array in arrays)

    def run(self, node: int) -> int:
        source = int(self.node_sources[node])
        if source < self.num_tokens:
            return int(self.leaf_runs[source])
        return int(self.branch_runs[source - self.num_tokens])

    def token(self, node: int) -> int | None:
        """Return the position in ``decode`` of a leaf's token; ``None`` if ``node`` is no leaf."""
        source = int(self.node_sources[node])
        is_leaf = source < self.num_tokens and node == self.run_start[self.leaf_runs[source]]
        return int(self.leaf_tokens[source]) if is_leaf else None

    def edge(self, node: int) -> Any:
        """Return the letter on the edge into ``node``; for a leaf, ``(None, position)``."""
        token = self.token(node)
        return self.letter(node) if token is None else (None, token)

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
        """Return the children of ``node``: leaves, then inner nodes by the code of their letter."""
        run = self.run(node)
        if node > self.run_start[run]:
            return range(node - 1, node)
        first, end = self.run_children[run], self.run_children[run + 1]
        return (self.run_start[first + 1 : end + 1] - 1).tolist()
