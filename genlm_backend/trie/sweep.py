"""The bottom-up sweeps: one pass over the runs of a trie for one row of weights.

``runs`` is scratch for the value of each run; its dtype is that of the arithmetic.

Every sweep gathers the weights of the tokens into the runs of their leaves, combines each run
into its parent's (children have smaller numbers than their parents, so that a run is complete
when its turn comes), and copies the value of each run to the nodes of it. All three passes go
straight through memory, and but for the log-sum-exp none has a branch to predict.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from genlm_backend.trie.compiled import compiled


@compiled
def sweep_sum(ws, out, runs, leaf_runs, leaf_tokens, run_parent, run_children, node_run):
    """Write the sum under each node to ``out``."""
    runs[:] = 0
    for k in range(len(leaf_runs)):
        runs[leaf_runs[k]] = ws[leaf_tokens[k]]
    for r in range(len(run_parent)):
        runs[run_parent[r]] += runs[r]
    for node in range(len(node_run)):
        out[node] = runs[node_run[node]]


@compiled
def sweep_max(ws, out, runs, leaf_runs, leaf_tokens, run_parent, run_children, node_run):
    """Write the maximum under each node to ``out``; a NaN is larger than anything."""
    runs[:] = -np.inf
    for k in range(len(leaf_runs)):
        runs[leaf_runs[k]] = ws[leaf_tokens[k]]
    for r in range(len(run_parent)):
        x = runs[r]
        y = runs[run_parent[r]]
        runs[run_parent[r]] = x if (x > y) | (x != x) else y
    for node in range(len(node_run)):
        out[node] = runs[node_run[node]]


@compiled
def sweep_log_sum(ws, out, runs, leaf_runs, leaf_tokens, run_parent, run_children, node_run):
    """Write the log-sum-exp under each node to ``out``, shifted by each node's own maximum."""
    for k in range(len(leaf_runs)):
        runs[leaf_runs[k]] = ws[leaf_tokens[k]]
    for r in range(len(run_children) - 1):
        first = run_children[r]
        end = run_children[r + 1]
        if first == end:
            continue
        largest = runs[first]
        for child in range(first + 1, end):
            x = runs[child]
            largest = x if (x > largest) | (x != x) else largest
        if np.isinf(largest) or np.isnan(largest):
            runs[r] = largest  # nothing to shift by: all -inf, or an inf, or a NaN
            continue
        total = 0.0
        for child in range(first, end):
            total += np.exp(runs[child] - largest)
        runs[r] = largest + np.log(total)
    for node in range(len(node_run)):
        out[node] = runs[node_run[node]]


Sweep = Callable[..., None]

SWEEPS: dict[str, Sweep] = {"sum": sweep_sum, "max": sweep_max, "log_sum": sweep_log_sum}
"""The sweep of each operation."""
