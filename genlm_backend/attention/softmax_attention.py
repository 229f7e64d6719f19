"""SoftmaxAttention: attention to one block of keys, with the logsumexp of the scores.

The logsumexps serve to merge the results of several blocks (Milakov and Gimelshein, 2018,
arXiv:1805.02867; Hydragen: Juravsky et al., 2024, arXiv:2402.05099).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, final

import numpy as np
import torch

A = TypeVar("A", bound=Any)
"""``torch.Tensor`` or ``mx.array``, which share indexing and reshaping."""


@final
@dataclass(frozen=True, slots=True)
class ArrayOps(Generic[A]):
    """The operators of one library; those named ``…_`` may overwrite their first argument."""

    lib: Any  # has ``concatenate``, ``log``, ``logaddexp``, ``sigmoid`` and ``zeros_like``
    put: Callable[[torch.Tensor, Any], A]
    device_of: Callable[[A], Any]
    as_type_of: Callable[[A, A], A]
    fill_: Callable[[A, A, float], A]
    at_least_: Callable[[A, float], A]
    exp_: Callable[[A], A]
    tanh_: Callable[[A], A]
    lerp: Callable[[A, A, A], A]
    largest: Callable[[A], A]
    total: Callable[[A], A]
    products: Callable[[A, A, float], A]
    means_: Callable[[A, A, A], A]
    # The last argument is the number of query heads per key head if causal, else 0.
    fused: Callable[[A, A, A, float, A | None, int], tuple[A, A] | None]


MAX_SCORES: Final = 4 << 20
"""About how many scores are computed at once without a fused operator; queries are split to fit."""

_SMALLEST: Final = float(np.finfo(np.float32).min)
_TINIEST: Final = float(np.finfo(np.float32).tiny)


@final
@dataclass(slots=True, eq=False)
class AttentionState(Generic[A]):
    """Attention of ``N`` rows of ``M`` queries to some keys; ``merge_state`` adds other keys."""

    ops: ArrayOps[A]
    values: A  # [N, heads, M, value_dim]
    logsumexp: A  # [N, heads, M] float32 or float64

    def merge_state(self, other: AttentionState[A], rows: A | None) -> None:
        """Merge the result for other keys into ``rows`` or, if ``rows`` is ``None``, into all."""
        ops, values, logsumexp = self.ops, self.values, self.logsumexp
        if rows is not None:
            values, logsumexp = values[rows], logsumexp[rows]
        share = ops.lib.sigmoid(other.logsumexp - logsumexp)
        # If neither block has a key for a query, -inf - -inf is NaN; ``other`` then has share 0.
        share = ops.fill_(share, other.logsumexp == -math.inf, 0)[..., None]
        values = ops.lerp(values, other.values, ops.as_type_of(share, values))
        logsumexp = ops.lib.logaddexp(logsumexp, other.logsumexp)
        if rows is None:
            self.values, self.logsumexp = values, logsumexp
        else:
            self.values[rows], self.logsumexp[rows] = values, logsumexp

    def split_rows(self, num_rows: int) -> AttentionState[A]:
        """Return a state with ``M`` queries in each of ``num_rows`` rows: undo ``join_rows``."""
        _, num_heads, _, dim = self.values.shape
        return AttentionState(
            self.ops,
            self.values.reshape(num_heads, num_rows, -1, dim).swapaxes(0, 1),
            self.logsumexp.reshape(num_heads, num_rows, -1).swapaxes(0, 1),
        )


def join_rows(queries: A) -> A:
    """Return queries reshaped from ``[G, heads, M, dim]`` to ``[1, heads, G * M, dim]``."""
    num_rows, num_heads, num_queries, dim = queries.shape
    return queries.swapaxes(0, 1).reshape(1, num_heads, num_rows * num_queries, dim)


@final
@dataclass(frozen=True, slots=True)
class SoftmaxAttention(Generic[A]):
    """Attention whose scores are multiplied by ``scaling`` and capped by ``softcap``, if given."""

    ops: ArrayOps[A]
    scaling: float
    softcap: float | None = None

    def attend(
        self, query: A, keys: A, values: A, mask: A | None, causal_group: int = 0
    ) -> AttentionState[A]:
        """Attend, fused if possible; ``causal_group``: query heads per key head if causal, or 0."""
        if self.softcap is None:
            found = self.ops.fused(query, keys, values, self.scaling, mask, causal_group)
            if found is not None:
                return AttentionState(self.ops, *found)
        return self.attend_if_any(query, keys, values, mask)

    def attend_if_any(self, query: A, keys: A, values: A, mask: A | None) -> AttentionState[A]:
        """Attend without a fused operator; also for queries that may attend to no key."""
        num_queries = query.shape[2]
        size = max(1, MAX_SCORES // (query.shape[0] * query.shape[1] * keys.shape[2]))
        if num_queries <= size:
            return self._attend(query, keys, values, mask)
        found: list[AttentionState[A]] = []
        for start in range(0, num_queries, size):
            part = slice(start, start + size)
            own = None if mask is None else mask[:, :, part]
            found.append(self._attend(query[:, :, part], keys, values, own))
        concat = self.ops.lib.concatenate
        return AttentionState(
            self.ops,
            concat([one.values for one in found], 2),
            concat([one.logsumexp for one in found], 2),
        )

    def _attend(self, query: A, keys: A, values: A, mask: A | None) -> AttentionState[A]:
        ops = self.ops
        scores = ops.products(query, keys, self.scaling)
        if self.softcap is not None:
            scores /= self.softcap
            scores = ops.tanh_(scores)
            scores *= self.softcap
        if mask is not None:
            scores += mask
        largest = ops.largest(scores)
        if mask is not None:  # or fully masked queries would get NaN weights
            largest = ops.at_least_(largest, _SMALLEST)
        scores -= largest
        weights = ops.exp_(scores)
        total = ops.total(weights)
        largest += ops.lib.log(total)
        logsumexp = largest[..., 0]
        if mask is not None:
            total = ops.at_least_(total, _TINIEST)
        return AttentionState(ops, ops.means_(weights, total, values), logsumexp)
