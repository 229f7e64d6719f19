"""Reachability: which tokens lie below which branch, as a sparse matrix with short rows.

The columns are the tokens in alphabetical order, then the blocks: a block has ``RADIX`` tokens or
``RADIX`` blocks of the level before. The tokens of a branch (see ``layout.py``) are an interval.
Each level covers each end of the interval with fewer than ``RADIX`` columns, and the next level the
rest (Bentley's segment tree). A root of 128,256 tokens needs 21 columns. Short sums are fast in
parallel, and accurate in float32. The *sweeps* are loops on the CPU that do without the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genlm_backend.runtime.compiled import compiled
from genlm_backend.trie.layout import TrieLayout

RADIX = 16
"""Number of tokens in a block, and of blocks in a block of the next level."""

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Reachability:
    """A boolean matrix, branches × (tokens and blocks of tokens), in CSR format."""

    level_sizes: list[int]  # number of tokens, then of the blocks of each level
    row_starts: Int64  # [num_branches + 1] int64, each row's start in ``columns``, then the end
    columns: Int64  # int64, the columns of row 0, then those of row 1, and so on
    node_sources: Int64  # [num_nodes] int64, indices into the columns followed by the rows


def build_reachability(layout: TrieLayout) -> Reachability:
    num_tokens = layout.num_tokens
    rank = np.empty(num_tokens, np.int64)
    rank[layout.sorted_tokens] = np.arange(num_tokens)
    first = -_largest_by_branch(layout, -rank)
    end = _largest_by_branch(layout, rank) + 1

    level_sizes = [num_tokens]
    while level_sizes[-1] >= RADIX:
        level_sizes.append(level_sizes[-1] // RADIX)
    rows, columns = _cover(first, end, level_sizes)
    order = np.lexsort((columns, rows))
    row_starts = np.zeros(len(first) + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=len(first)), out=row_starts[1:])

    column_or_row = np.arange(num_tokens + layout.num_branches) - num_tokens + sum(level_sizes)
    column_or_row[:num_tokens] = rank[layout.leaf_tokens]
    return Reachability(level_sizes, row_starts, columns[order], column_or_row[layout.node_sources])


def _largest_by_branch(layout: TrieLayout, ranks: Int64) -> Int64:
    out = np.empty(layout.num_nodes)
    values = np.empty(layout.num_tokens + layout.num_branches)
    totals = np.empty(layout.num_branches + 1)
    sweep_max(ranks.astype(np.float64), out, values, totals, *layout.sweep_arrays)
    return values[layout.num_tokens :].astype(np.int64)


def _cover(first: Int64, end: Int64, level_sizes: list[int]) -> tuple[Int64, Int64]:
    """Return rows and columns of the tokens and blocks that make up each ``[first, end)``."""
    rows: list[Int64] = []
    columns: list[Int64] = []
    offset = 0
    interval = np.arange(len(first))
    for size in level_sizes:
        # Later levels cover ``left`` to ``right`` if that is not empty; this level covers the rest.
        left, right = -(-first // RADIX) * RADIX, end // RADIX * RADIX
        is_apart = left < right
        for a, b in ((first, np.where(is_apart, left, end)), (np.where(is_apart, right, end), end)):
            lengths = b - a
            row = np.repeat(interval, lengths)
            within = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            rows.append(row)
            columns.append(offset + np.repeat(a, lengths) + within)
        interval = interval[is_apart]
        first, end = left[is_apart] // RADIX, right[is_apart] // RADIX
        offset += size
    return np.concatenate(rows), np.concatenate(columns)


@compiled
def _copy_to_nodes(values, out, node_sources) -> None:
    for node in range(len(node_sources)):
        out[node] = values[node_sources[node]]


@compiled
def _maximise(ws, values, totals, leaf_tokens, leaf_parents, branch_parents) -> None:
    """Write branch maxima to ``totals``, weights and these to ``values``; NaN is the largest."""
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


@compiled
def sweep_sum(
    ws, out, values, totals, leaf_tokens, leaf_parents, branch_parents, node_sources
) -> None:
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
    _copy_to_nodes(values, out, node_sources)


@compiled
def sweep_max(
    ws, out, values, totals, leaf_tokens, leaf_parents, branch_parents, node_sources
) -> None:
    """Write the maximum under each node to ``out``; NaN counts as the largest."""
    _maximise(ws, values, totals, leaf_tokens, leaf_parents, branch_parents)
    _copy_to_nodes(values, out, node_sources)


@compiled
def sweep_log_sum(
    ws, out, values, totals, leaf_tokens, leaf_parents, branch_parents, node_sources
) -> None:
    """Write the log-sum-exp under each node to ``out``; exp gets x minus the branch's maximum."""
    num_leaves = np.uint64(len(leaf_tokens))
    num_branches = len(branch_parents)
    shifts = np.empty_like(totals)
    _maximise(ws, values, shifts, leaf_tokens, leaf_parents, branch_parents)
    for b in range(num_branches + 1):
        if not np.isfinite(shifts[b]):
            shifts[b] = 0.0  # do not shift by -inf, inf or NaN: exp and log preserve these
    totals[:] = 0
    for k in range(len(leaf_tokens)):
        totals[leaf_parents[k]] += np.exp(np.float64(values[k]) - shifts[leaf_parents[k]])
    for b in range(num_branches):
        x = shifts[b] + np.log(totals[b])
        values[num_leaves + np.uint64(b)] = x
        totals[branch_parents[b]] += np.exp(x - shifts[branch_parents[b]])
    _copy_to_nodes(values, out, node_sources)


Sweep = Callable[..., None]

SWEEPS: dict[str, Sweep] = {"sum": sweep_sum, "max": sweep_max, "log_sum": sweep_log_sum}
