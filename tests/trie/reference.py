"""An independent answer: prefixes as tuples, weights in float64, no tree."""

from __future__ import annotations

import math

import numpy as np


def letters_of(item):
    return tuple(item)


class BruteForceTrie:
    """Every prefix with the positions of the tokens that begin with it."""

    def __init__(self, decode):
        self.below = {}
        self.num_tokens = len(decode)
        for position, item in enumerate(decode):
            letters = letters_of(item)
            for length in range(len(letters) + 1):
                self.below.setdefault(letters[:length], []).append(position)

    @property
    def num_nodes(self):
        return len(self.below) + self.num_tokens

    def weights(self, operation, ws):
        """prefix → weight, by the definition of each operation."""
        ws = np.asarray(ws, np.float64)
        return {prefix: OPERATIONS[operation](ws[tokens]) for prefix, tokens in self.below.items()}


def log_sum(values):
    largest = values.max()
    if not math.isfinite(largest):
        return largest
    return largest + math.log(math.fsum(np.exp(values - largest)))


OPERATIONS = {
    "sum": lambda values: values.sum() if not np.isfinite(values).all() else math.fsum(values),
    "max": np.max,
    "log_sum": log_sum,
}


def node_of(trie, letters):
    node = trie.root
    for letter in letters:
        node = trie.children[node][letter]
    return node


def nodes_by_prefix(trie):
    """Every prefix with its node, by walking down."""
    found, todo = {}, [((), trie.root)]
    while todo:
        prefix, node = todo.pop()
        found[prefix] = node
        for letter, child in trie.children[node].items():
            if child not in trie.leaf2word:
                todo.append(((*prefix, letter), child))
    return found
