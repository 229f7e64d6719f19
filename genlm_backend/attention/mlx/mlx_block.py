"""Block: attention to some keys and values, with the logarithm of what the weights sum to.

Blocks that are attended to one by one are merged by these logarithms (Milakov and Gimelshein,
2018, arXiv:1805.02867; Hydragen: Juravsky et al., 2024, arXiv:2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import mlx.core as mx

MAX_SCORES: Final = 4 << 20
"""Number of scores that are held at once, at most; more queries go one stretch after another."""

_SMALLEST: Final = float(mx.finfo(mx.float32).min)


@final
@dataclass(slots=True, eq=False)
class MlxAttended:
    """What some queries have attended to so far.

    Attributes:
        values: Weighted means of the values: float32 ``[N, heads, M, value_dim]``.
        logsumexp: Logarithms of the sums of the exponentials of the scores: float32
            ``[N, heads, M]``; about the smallest float32 where everything was masked.
    """

    values: mx.array
    logsumexp: mx.array

    def merge(self, other: MlxAttended, rows: mx.array | None) -> None:
        """Add what the queries of some rows have attended to in another block.

        Args:
            other: With as many ``N`` as there are rows.
            rows: Their numbers; ``None`` for all.
        """
        values, logsumexp = self.values, self.logsumexp
        if rows is not None:
            values, logsumexp = values[rows], logsumexp[rows]
        share = mx.sigmoid(other.logsumexp - logsumexp)[..., None]
        values = values + share * (other.values - values)
        logsumexp = mx.logaddexp(logsumexp, other.logsumexp)
        if rows is None:
            self.values, self.logsumexp = values, logsumexp
        else:
            self.values[rows], self.logsumexp[rows] = values, logsumexp

    def dampen(self, sinks: mx.array) -> None:
        """Add one more score for each query, which has no value: ``[heads, M]``."""
        self.values = self.values * mx.sigmoid(self.logsumexp - sinks)[..., None]


def attend(query: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> MlxAttended:
    """Attend from ``M`` queries to ``n`` keys and values, in float32.

    Args:
        query: Scaled, float32: ``[N, heads, M, dim]``.
        keys: ``[N, heads, n, dim]``.
        values: ``[N, heads, n, value_dim]``.
        mask: What is added to the scores: float32 ``[N, 1, M, n]`` of 0 and ``-inf``; ``None`` for
            zeros. A query may attend to nothing.
    """
    num_rows, num_heads, num_queries, _ = query.shape
    size = max(1, MAX_SCORES // (num_rows * num_heads * keys.shape[2]))
    if num_queries <= size:
        return _attend(query, keys, values, mask)
    found = [
        _attend(
            query[:, :, start : start + size],
            keys,
            values,
            None if mask is None else mask[:, :, start : start + size],
        )
        for start in range(0, num_queries, size)
    ]
    return MlxAttended(
        mx.concatenate([one.values for one in found], 2),
        mx.concatenate([one.logsumexp for one in found], 2),
    )


def _attend(
    query: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
) -> MlxAttended:
    scores = query @ keys.astype(mx.float32).swapaxes(2, 3)
    if mask is not None:
        scores = scores + mask
    largest = mx.maximum(scores.max(-1, keepdims=True), _SMALLEST)
    weights = mx.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if mask is not None:  # or the values of a query that attends to nothing would be NaN
        total = mx.maximum(total, mx.finfo(mx.float32).smallest_normal)
    logsumexp = (largest + mx.log(total)).squeeze(-1)
    return MlxAttended((weights @ values.astype(mx.float32)) / total, logsumexp)
