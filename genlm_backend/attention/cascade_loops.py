"""Compiled loops that find the prefixes that several rows share; see ``cascade_plan.py``.

A row's node is its last cached token. Row by row, ``_climb`` walks from there towards the root, and
numbers from 1 the tokens that no earlier row has; every root has number 0. So the number of a
token's ancestor is larger than the token's if one row numbered both, else smaller. In depth-first
order, the rows that have a token are consecutive.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genlm_backend.prefix.slot_allocator import PADDING_SLOT
from genlm_backend.runtime.compiled import compiled


@compiled
def divide(
    parent: Any, depth: Any, slot: Any, nodes: Any, is_long: Any, few_tokens: int, numbers: Any
) -> Any:
    """Divide the cached tokens of ``B`` rows into prefixes, which rows may share, and suffixes."""
    found, first, above, last = _climb(parent, depth, nodes, numbers)
    slots, positions = np.empty(len(above), np.int64), np.empty(len(above), np.int64)
    for k in range(1, len(above)):
        slots[k], positions[k] = slot[found[k]], depth[found[k]] - 1
    num_rows, num_long = _count(first, above, last, is_long)
    starts, order = _order(first, above, last, num_rows)
    in_suffix, bounds, shared = _shared(first, above, slots, num_rows, num_long, few_tokens)
    suffix = _suffix(first, above, last, in_suffix, slots, positions)
    return slots, positions, shared, bounds, starts, num_rows, order, suffix


@compiled
def _climb(parent: Any, depth: Any, nodes: Any, numbers: Any) -> Any:
    most = 0
    for row in range(len(nodes)):
        most += depth[nodes[row]]
    found = np.empty(min(most, len(parent)) + 1, np.int64)
    first = np.empty(len(nodes) + 1, np.int64)
    found[0], num_found = 0, 1
    for row in range(len(nodes)):
        first[row] = num_found
        node = nodes[row]
        while depth[node] > 0 and numbers[node] == 0:
            numbers[node] = num_found
            found[num_found] = node
            num_found += 1
            node = np.int64(parent[node])
    first[len(nodes)] = num_found
    above = np.zeros(num_found, np.int64)
    for k in range(1, num_found):
        above[k] = numbers[parent[found[k]]]
    last = np.empty(len(nodes), np.int64)
    for row in range(len(nodes)):
        last[row] = numbers[nodes[row]]
    return found, first, above, last


@compiled
def _count(first: Any, above: Any, last: Any, is_long: Any) -> Any:
    """Return for each token how many rows have it, and how many of them have many new tokens."""
    num_rows, num_long = np.zeros(len(above), np.int64), np.zeros(len(above), np.int64)
    for row in range(len(last)):
        num_rows[last[row]] += 1
        num_long[last[row]] += is_long[row]
    for row in range(len(last) - 1, -1, -1):
        for k in range(first[row], first[row + 1]):
            num_rows[above[k]] += num_rows[k]
            num_long[above[k]] += num_long[k]
    return num_rows, num_long


@compiled
def _order(first: Any, above: Any, last: Any, num_rows: Any) -> Any:
    """Return where each token's rows start in depth-first order, and all rows in that order."""
    starts, num_placed = np.zeros(len(above), np.int64), np.zeros(len(above), np.int64)
    stops = np.zeros(len(above), np.int64)  # start of the rows of each token's next child
    num_last = np.zeros(len(above), np.int64)
    for row in range(len(last)):
        num_last[last[row]] += 1
    stops[0] = num_last[0]
    for row in range(len(last)):
        for k in range(first[row + 1] - 1, first[row] - 1, -1):
            starts[k] = stops[above[k]]
            stops[above[k]] += num_rows[k]
            stops[k] = starts[k] + num_last[k]
    order = np.empty(len(last), np.int64)
    for row in range(len(last)):
        order[starts[last[row]] + num_placed[last[row]]] = row
        num_placed[last[row]] += 1
    return starts, order


@compiled
def _shared(
    first: Any, above: Any, slots: Any, num_rows: Any, num_long: Any, few_tokens: int
) -> Any:
    """Choose the tokens of each prefix; all other tokens stay in the suffixes."""
    in_suffix = np.ones(len(above), np.bool_)
    shared, bounds = np.empty(len(above), np.int64), np.empty(len(above) + 1, np.int64)
    num_shared = num_prefixes = 0
    for row in range(len(first) - 1):
        top = first[row + 1] - 1
        while top >= first[row]:
            # The tokens from ``top`` down to ``bottom`` all have the same rows.
            bottom = top
            while bottom > first[row] and num_rows[bottom - 1] == num_rows[top]:
                bottom -= 1
            num_others, start = 0, top
            while start >= bottom:
                stop = start  # the end of a run of consecutive slots, which is read in place
                while stop > bottom and slots[stop - 1] == slots[stop] + 1:
                    stop -= 1
                size = start - stop + 1
                if size * num_rows[top] >= few_tokens and 2 * size > few_tokens:
                    bounds[num_prefixes] = num_shared
                    num_prefixes += 1
                    for k in range(start, stop - 1, -1):
                        shared[num_shared], in_suffix[k] = k, False
                        num_shared += 1
                else:
                    num_others += size
                start = stop - 1
            num_saved = (num_rows[top] - 1) * num_others  # reads saved by one gather for all rows
            if num_others > 0 and (num_saved >= few_tokens or num_long[top] > 0):
                bounds[num_prefixes] = num_shared
                num_prefixes += 1
                for k in range(top, bottom - 1, -1):
                    if in_suffix[k]:
                        shared[num_shared], in_suffix[k] = k, False
                        num_shared += 1
            top = bottom - 1
    bounds[num_prefixes] = num_shared
    return in_suffix, bounds[: num_prefixes + 1], shared[:num_shared]


@compiled
def _suffix(first: Any, above: Any, last: Any, in_suffix: Any, slots: Any, positions: Any) -> Any:
    """Return each row's suffix, left-padded to ``P`` tokens: slots, positions ``[2, B, P]``."""
    nearest = np.zeros(len(above), np.int64)  # nearest suffix token: itself or an ancestor
    sizes = np.zeros(len(above), np.int64)
    for row in range(len(last)):
        for k in range(first[row + 1] - 1, first[row] - 1, -1):
            nearest[k] = k if in_suffix[k] else nearest[above[k]]
            sizes[k] = sizes[above[k]] + in_suffix[k]
    num_columns = 0
    for row in range(len(last)):
        num_columns = max(num_columns, sizes[last[row]])
    suffix = np.empty((2, len(last), num_columns), np.int64)
    suffix[0], suffix[1] = PADDING_SLOT, -1
    for row in range(len(last)):
        k, column = nearest[last[row]], num_columns
        while k > 0:
            column -= 1
            suffix[0, row, column], suffix[1, row, column] = slots[k], positions[k]
            k = nearest[above[k]]
    return suffix


@compiled
def write_last(parent: Any, depth: Any, slot: Any, nodes: Any, slots: Any) -> None:
    for row in range(len(nodes)):
        node = nodes[row]
        for column in range(min(slots.shape[1], depth[node])):
            slots[row, column] = slot[node]
            node = parent[node]
