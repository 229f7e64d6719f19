"""The bottom-up sweeps: from one row of weights to the weight of every node.

Each makes three passes, straight through memory and without a branch to predict:

1. the weight of each token goes to its leaf, and is combined into the branch the leaf hangs at;
2. each branch, complete because children have smaller numbers, is combined into its parent;
3. every node takes the value of the leaf or the branch that its run ends in.

``values`` is scratch for the values of leaves and branches, ``[num_tokens + num_branches]``, in
the dtype of the result; ``totals`` is where they are combined, ``[num_branches + 1]``, in the
dtype of the arithmetic. Its last element stands in for the parent of what has none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from genlm_backend.runtime.compiled import compiled


@compiled
def sweep_sum(
    ws, out, values, totals, leaf_tokens, leaf_parents, branch_parents, node_sources
) -> None:
    """Write the sum under each node to ``out``."""
    num_leaves = np.uint64(len(leaf_tokens))
    totals[:] = 0
    for k in range(len(leaf_tokens)):
        x = ws[leaf_tokens[k]]
        values[k] = x
        totals[leaf_parents[k]] += x
    for b in range(len(branch_parents)):
        x = totals[b]
        values[num_leaves + np.uint64(b)] = x
        totals[branch_parents[b]] += x
    for node in range(len(node_sources)):
        out[node] = values[node_sources[node]]


@compiled
def sweep_max(
    ws, out, values, totals, leaf_tokens, leaf_parents, branch_parents, node_sources
) -> None:
    """Write the maximum under each node to ``out``; a NaN is larger than anything."""
    num_leaves = np.uint64(len(leaf_tokens))
    totals[:] = -np.inf
    for k in range(len(leaf_tokens)):
        x = ws[leaf_tokens[k]]
        values[k] = x
        y = totals[leaf_parents[k]]
        totals[leaf_parents[k]] = x if (x > y) | (x != x) else y
    for b in range(len(branch_parents)):
        x = totals[b]
        values[num_leaves + np.uint64(b)] = x
        y = totals[branch_parents[b]]
        totals[branch_parents[b]] = x if (x > y) | (x != x) else y
    for node in range(len(node_sources)):
        out[node] = values[node_sources[node]]


@compiled
def sweep_log_sum(
    ws, out, values, totals, leaf_tokens, leaf_parents, branch_parents, node_sources
) -> None:
    """Write the log-sum-exp under each node to ``out``, shifted by each node's own maximum."""
    num_leaves = np.uint64(len(leaf_tokens))
    num_branches = len(branch_parents)
    shifts = np.empty_like(totals)
    shifts[:] = -np.inf
    for k in range(len(leaf_tokens)):
        x = ws[leaf_tokens[k]]
        values[k] = x
        y = shifts[leaf_parents[k]]
        shifts[leaf_parents[k]] = x if (x > y) | (x != x) else y
    for b in range(num_branches):
        x = shifts[b]
        y = shifts[branch_parents[b]]
        shifts[branch_parents[b]] = x if (x > y) | (x != x) else y
    for b in range(num_branches + 1):
        if not np.isfinite(shifts[b]):
            shifts[b] = 0.0  # all -inf, or an inf or a NaN: exp and log keep each of them
    totals[:] = 0
    for k in range(len(leaf_tokens)):
        totals[leaf_parents[k]] += np.exp(np.float64(values[k]) - shifts[leaf_parents[k]])
    for b in range(num_branches):
        x = shifts[b] + np.log(totals[b])
        values[num_leaves + np.uint64(b)] = x
        totals[branch_parents[b]] += np.exp(x - shifts[branch_parents[b]])
    for node in range(len(node_sources)):
        out[node] = values[node_sources[node]]


Sweep = Callable[..., None]

SWEEPS: dict[str, Sweep] = {"sum": sweep_sum, "max": sweep_max, "log_sum": sweep_log_sum}
"""The sweep of each operation."""
