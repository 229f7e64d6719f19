"""A loop over the nodes that have running states, compiled; the arrays are those of ``Nodes``."""

from __future__ import annotations

import numpy as np

from genlm_backend.runtime.compiled import compiled


@compiled
def _marked(parents, depths, states, nodes, index):
    """Return nodes, and those between them where their paths part or that have states.

    ``index`` is zero everywhere; the number of a node among those that are returned is written
    there, from 1 on.
    """
    is_passed = np.zeros(len(parents), np.bool_)
    found = np.empty(2 * len(nodes) + 1, np.int32)
    count = len(nodes)
    for i in range(count):
        found[i], index[nodes[i]] = nodes[i], i + 1
    for end in nodes:
        node = parents[end]
        while depths[node] > 0 and index[node] == 0:
            if is_passed[node] or states[node] != 0:
                if count == len(found):
                    found = np.concatenate((found, np.empty(count, np.int32)))
                found[count] = node
                count += 1
                index[node] = count
                if is_passed[node]:
                    break
            is_passed[node] = True
            node = parents[node]
    return found[:count]


@compiled
def _asked(parents, depths, states, nodes, has_state, weights):
    """Return the tree of nodes, and how often each is computed or gone on from."""
    index = np.zeros(len(parents), np.int32)
    all_nodes = _marked(parents, depths, states, nodes, index)
    size = len(all_nodes)
    above, num_tokens = np.full(size, -1, np.int64), np.empty(size, np.int64)
    has, asked = np.ones(size, np.bool_), np.zeros(size, np.int64)
    has[: len(nodes)] = has_state
    for i in range(size):
        node = all_nodes[i]
        if i >= len(nodes):
            has[i] = states[node] != 0
        num_tokens[i] = depths[node]
        node = parents[node]
        while depths[node] > 0 and index[node] == 0:
            node = parents[node]
        above[i] = index[node] - 1
        num_tokens[i] -= depths[node]
    for i in range(len(nodes)):
        other = i if weights[i] else -1
        while other >= 0:
            asked[other] += weights[i]
            if has[other]:
                break
            other = above[other]
    return above, num_tokens, has, asked


@compiled
def unasked(parents, depths, states, nodes, has_state, weights):
    """Return whether each of some nodes is neither asked nor gone on from, as ``most_missed``."""
    return _asked(parents, depths, states, nodes, has_state, weights)[3][: len(nodes)] == 0


@compiled
def most_missed(
    parents, depths, states, nodes, has_state, may_stay, weights, shares, times, now, chosen
):
    """Choose the states that spare the most tokens to compute, one after another or some at once.

    It is the greedy choice by which the marginal gain of each is the largest: the tokens from the
    last state before it, but for those that are computed for other contexts in any case. Behind
    those of this batch come those that earlier ones used, the youngest first and of these the
    ones that are the most tokens behind another, since contexts of other batches may go on from
    them; and then what spares nothing.
    """
    above, num_tokens, has, asked = _asked(parents, depths, states, nodes, has_state, weights)
    is_left, gains = may_stay.copy(), np.empty(len(nodes), np.int64)
    num_chosen = 0
    while num_chosen < len(chosen):
        for i in range(len(nodes)):
            gains[i] = -1
            if not is_left[i]:
                continue
            gain, other, is_old = np.int64(0), i, times[i] < now
            while other >= 0 and (is_old or asked[i] > 0):
                gain += num_tokens[other]
                other = above[other]
                is_others = shares and not is_old and asked[other] > asked[i]
                if other >= 0 and (has[other] or is_others):
                    break
            if not (is_old or shares):
                gain *= asked[i]
            gains[i] = (times[i] << 32) + gain if gain > 0 else 0
        # One after another where they are few; of many, an eighth of what is left.
        count = max(1, (len(chosen) - num_chosen) // 8)
        least = np.partition(gains, len(gains) - count)[len(gains) - count]
        for is_equal in range(2):
            for i in range(len(nodes)):
                is_next = gains[i] == least if is_equal else gains[i] > least
                if not is_next or not is_left[i] or count == 0:
                    continue
                chosen[num_chosen], is_left[i], has[i] = i, False, True
                num_chosen, count = num_chosen + 1, count - 1
                other = above[i]
                while other >= 0:
                    asked[other] -= asked[i]
                    if has[other]:
                        break
                    other = above[other]
