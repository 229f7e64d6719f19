"""Compiled loops over the nodes of a prefix tree; they take the arrays of ``Nodes``.

The table of children is a hash table with open addressing and linear probing; deletion moves later
entries back (Knuth, The Art of Computer Programming, volume 3, algorithm 6.4R).
"""

from __future__ import annotations

import numpy as np

from genlm_backend.runtime.compiled import compiled

_AT_ONCE = 64
"""Number of tokens that one branch-free loop compares."""

DIGEST_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""The base of ``Nodes.digest``, a polynomial hash of the tokens on the path to a node."""


@compiled
def _home(parent, token, mask):
    """Return the table index at which the search for a child begins."""
    mixed = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64(np.uint32(token)) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(mask))


@compiled
def child_of(parents, tokens, table, node, token):
    mask = len(table) - 1
    place = _home(node, token, mask)
    while True:
        child = table[place]
        if child == 0 or (parents[child] == node and tokens[child] == token):
            return child
        place = (place + 1) & mask


@compiled
def _put(parents, tokens, table, node):
    mask = len(table) - 1
    place = _home(parents[node], tokens[node], mask)
    while table[place] != 0:
        place = (place + 1) & mask
    table[place] = node


@compiled
def _take(parents, tokens, table, node):
    mask = len(table) - 1
    hole = _home(parents[node], tokens[node], mask)
    while table[hole] != node:
        hole = (hole + 1) & mask
    place = hole
    while True:
        place = (place + 1) & mask
        other = table[place]
        if other == 0:
            break
        home = _home(parents[other], tokens[other], mask)
        if ((place - home) & mask) >= ((place - hole) & mask):  # hole is on other's search path
            table[hole] = other
            hole = place
    table[hole] = 0


@compiled
def fill_table(parents, tokens, table, nodes):
    for node in nodes:
        _put(parents, tokens, table, node)


@compiled
def walk(parents, tokens, first, table, node, wanted):
    """Follow token ids from a node down, while children for them exist; return the last node."""
    done = 0
    while done < len(wanted):
        # Nodes that one call added mostly have consecutive numbers. So 64 tokens are compared at a
        # time, without loading each next node first: 4,000 tokens take 1 us instead of 12 us.
        while done + _AT_ONCE <= len(wanted) and node + _AT_ONCE < len(first):
            links, ids = first[node : node + _AT_ONCE], tokens[node + 1 : node + 1 + _AT_ONCE]
            asked, next_node = wanted[done : done + _AT_ONCE], np.int32(node + 1)
            difference = np.int32(0)
            for i in range(_AT_ONCE):  # branch-free, so that the compiler vectorises it
                difference |= (links[i] - next_node - np.int32(i)) | (ids[i] ^ asked[i])
            if difference != 0:
                break
            node += _AT_ONCE
            done += _AT_ONCE
        for token in wanted[done : done + _AT_ONCE]:
            child = first[node]
            if child == 0 or tokens[child] != token:
                child = child_of(parents, tokens, table, node, token)
                if child == 0:
                    return node
            node = child
            done += 1
    return node


@compiled
def ancestors(parents, depths, nodes, wanted, found):
    """Write to ``found`` each node's ancestor at its wanted depth, or the node if not deeper."""
    for i in range(len(nodes)):
        node = nodes[i]
        while depths[node] > wanted[i]:
            node = parents[node]
        found[i] = node


@compiled
def last_states(parents, depths, states, nodes, found):
    """Write to ``found`` each node's nearest node with a state, at or above it, else its root."""
    for i in range(len(nodes)):
        node = nodes[i]
        while depths[node] > 0 and states[node] == 0:
            node = parents[node]
        found[i] = node


@compiled
def path(parents, depths, node, found):
    """Write to ``found`` the path from the first token's node to ``node``, both included."""
    for i in range(depths[node] - 1, -1, -1):
        found[i] = node
        node = parents[node]


@compiled
def fill_digests(digests, parents, tokens, depths, nodes):
    """Write the digests of nodes, given parents first; ``new_root`` sets the digests of roots."""
    for node in nodes:
        if depths[node] > 0:
            digest = digests[parents[node]] * DIGEST_FACTOR
            digests[node] = digest + np.uint64(tokens[node]) + np.uint64(1)


@compiled
def link(parents, tokens, first, children, on_device, stamps, slots, table, nodes, real, spare):
    """Link nodes, parents first, but no duplicates; return the number of slots in ``spare``."""
    num_spare = 0
    for i in range(len(nodes)):
        node = nodes[i]
        parent = parents[node]
        if children[parent] < 0:  # this loop has replaced the parent by ``first[parent]``
            parent = first[parent]
            parents[node] = parent
        found = child_of(parents, tokens, table, parent, tokens[node])
        if found == 0:
            _put(parents, tokens, table, node)
            children[parent] += 1
            on_device[parent] += 1
            if first[parent] == 0:
                first[parent] = node
            real[i] = node
            continue
        stamps[found] = max(stamps[found], stamps[node])
        # An existing child on the host takes the device slot of the new node.
        if slots[found] < 0:
            on_device[parent] += 1
            spare[num_spare] = slots[found]
            slots[found] = slots[node]
        else:
            spare[num_spare] = slots[node]
        num_spare += 1
        children[node], first[node] = -1, found
        real[i] = found
    return num_spare


@compiled
def unlink(parents, tokens, first, children, table, nodes):
    """Remove nodes from the table and from their parents; children come before their parents."""
    for node in nodes:
        _take(parents, tokens, table, node)
        parent = parents[node]
        children[parent] -= 1
        if first[parent] == node:
            first[parent] = 0


@compiled
def take_leaves(parents, depths, slots, stamps, num_below, queue, queued, taken, is_on_device):
    """Take queued leaves, and parents that become leaves; return how many, and the next index."""
    num_taken = 0
    for i in range(len(queue)):
        node = queue[i]
        if stamps[node] != queued[i] or num_below[node] != 0:
            continue
        while True:
            if num_taken == len(taken):
                queue[i], queued[i] = node, stamps[node]
                return num_taken, i
            taken[num_taken], num_below[node] = node, -1
            num_taken += 1
            stamp, node = stamps[node], parents[node]
            num_below[node] -= 1
            # A parent inherits its last child's stamp if that is later. If the parent's own stamp
            # is later, the parent waits until the queue is filled again.
            is_older = stamps[node] <= stamp
            stamps[node] = max(stamps[node], stamp)
            is_leaf = num_below[node] == 0 and depths[node] > 0
            if not (is_leaf and is_older and (slots[node] > 0) == is_on_device):
                break
    return num_taken, len(queue)


@compiled
def count_paths(parents, depths, slots, ends, is_seen):
    """Return how many device nodes are on the paths to ``ends``; ``is_seen`` must be all false."""
    total = 0
    for end in ends:
        node = end
        while depths[node] > 0 and not is_seen[node]:
            is_seen[node] = True
            total += slots[node] > 0
            node = parents[node]
    return total
