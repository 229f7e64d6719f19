"""Block: attention to some keys and values, with the logarithm of what the weights sum to.

Blocks that are attended to one by one are merged by these logarithms (Milakov and Gimelshein,
2018, arXiv:1805.02867; Hydragen: Juravsky et al., 2024, arXiv:2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch

from genlm_backend.attention.torch.fused import FusedOperator, fused_operator

FEW_QUERIES: Final = 16
"""Queries up to which keys are parted: the fused operator has one thread for each head of them."""

NUM_STRETCHES: Final = 4
"""Stretches that keys are parted into, each of which a thread takes."""

SHORTEST_STRETCH = 512
"""Keys that are worth a stretch."""

MAX_SCORES: Final = 4 << 20
"""Number of scores that are held at once, at most; more queries go one stretch after another."""


@final
@dataclass(slots=True, eq=False)
class Attended:
    """Partial attention of some queries.

    Attributes:
        values: Weighted means of the values: ``[N, heads, M, value_dim]``.
        logsumexp: Logarithms of the sums of the exponentials of the scores: float32
            ``[N, heads, M]``; ``-inf`` where everything was masked.
    """

    values: torch.Tensor
    logsumexp: torch.Tensor

    def merge(self, other: Attended, rows: torch.Tensor | None) -> None:
        """Add what the queries of some rows have attended to in another block.

        Args:
            other: With as many ``N`` as there are rows.
            rows: int64; ``None`` for all.
        """
        values, logsumexp = self.values, self.logsumexp
        if rows is not None:
            values, logsumexp = values[rows], logsumexp[rows]
        share = torch.sigmoid(other.logsumexp - logsumexp)
        # A query that attends to nothing in either block would have a share of NaN.
        share = share.masked_fill_(other.logsumexp == -torch.inf, 0).unsqueeze(-1)
        values = torch.lerp(values, other.values, share.to(values.dtype))
        logsumexp = torch.logaddexp(logsumexp, other.logsumexp)
        if rows is None:
            self.values, self.logsumexp = values, logsumexp
        else:
            self.values[rows], self.logsumexp[rows] = values, logsumexp

    def dampen(self, sinks: torch.Tensor) -> None:
        """Add one more score for each query, which has no value: ``[heads, M]``."""
        share = torch.sigmoid(self.logsumexp - sinks).unsqueeze(-1)
        self.values = self.values * share.to(self.values.dtype)


@final
@dataclass(frozen=True, slots=True)
class Block:
    """How scores are made of the products of queries and keys.

    Attributes:
        scaling: What products are multiplied by.
        softcap: Bound that scores approach, as in Gemma 2; ``None`` for no bound.
    """

    scaling: float
    softcap: float | None = None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> Attended:
        """Attend from ``M`` queries to ``n`` keys and values.

        Args:
            query: ``[N, heads, M, dim]``.
            keys: ``[N, heads, n, dim]``.
            values: ``[N, heads, n, value_dim]``.
            mask: What is added to the scores: float32 ``[N, 1, M, n]`` of 0 and ``-inf``; ``None``
                for zeros. Each query attends to something.
        """
        fused = self.fused(query, values)
        if fused is not None and mask is not None and fused.attend_with is not None:
            return Attended(*fused.attend_with(query, keys, values, self.scaling, mask))
        if fused is None or mask is not None:
            return self.attend_if_any(query, keys, values, mask)
        if fused.is_parted and len(query) == 1 and query.shape[2] <= FEW_QUERIES:
            return self._attend_in_stretches(fused, query, keys, values)
        return Attended(*fused.attend(query, keys, values, self.scaling, False))

    def _attend_in_stretches(
        self,
        fused: FusedOperator,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> Attended:
        """Attend from few queries to keys of which all threads take stretches at once."""
        size = keys.shape[2] // NUM_STRETCHES
        if size < SHORTEST_STRETCH:
            return Attended(*fused.attend(query, keys, values, self.scaling, False))
        stop = size * NUM_STRETCHES
        parted_keys, parted_values = (
            all_of[0, :, :stop].unflatten(1, (-1, size)).transpose(0, 1)
            for all_of in (keys, values)
        )
        queries = query.expand(NUM_STRETCHES, -1, -1, -1)
        found, logsumexp = fused.attend(queries, parted_keys, parted_values, self.scaling, False)
        shares = logsumexp.softmax(0).unsqueeze(-1)
        merged = (found * shares).sum(0, keepdim=True).to(found.dtype)
        total = Attended(merged, logsumexp.logsumexp(0, keepdim=True))
        if stop < keys.shape[2]:
            left = keys[:, :, stop:], values[:, :, stop:]
            total.merge(Attended(*fused.attend(query, *left, self.scaling, False)), None)
        return total

    def attend_causally(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group_size: int
    ) -> Attended:
        """Attend from each of ``Q`` tokens to itself and to those before it, where ``fused`` can.

        Args:
            query: ``[N, heads, group * Q, dim]``: heads of a group one after another.
            keys: ``[N, heads, Q, dim]``.
            values: ``[N, heads, Q, value_dim]``.
            group_size: Number of heads of a group.
        """
        fused = self.fused(query, values)
        assert fused is not None
        num_rows, num_groups, num_queries, dim = query.shape
        shape = num_rows, num_groups * group_size, num_queries // group_size, dim
        keys, values = (all_of.repeat_interleave(group_size, 1) for all_of in (keys, values))
        found, logsumexp = fused.attend(query.reshape(shape), keys, values, self.scaling, True)
        shape = num_rows, num_groups, num_queries
        return Attended(found.reshape(*shape, found.shape[-1]), logsumexp.reshape(shape))

    def fused(self, query: torch.Tensor, values: torch.Tensor) -> FusedOperator | None:
        """Return torch's operator for all of it, or ``None`` where it has none that is right."""
        dim = query.shape[-1]
        if dim != values.shape[-1] or self.softcap is not None:
            return None
        return fused_operator(query.device, query.dtype, dim)

    def attend_if_any(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> Attended:
        """Attend like ``attend``, where some queries may attend to nothing."""
        num_queries = query.shape[2]
        size = max(1, MAX_SCORES // (query.shape[0] * query.shape[1] * keys.shape[2]))
        if num_queries <= size:
            return self._attend(query, keys, values, mask)
        found = [
            self._attend(
                query[:, :, start : start + size],
                keys,
                values,
                None if mask is None else mask[:, :, start : start + size],
            )
            for start in range(0, num_queries, size)
        ]
        return Attended(
            torch.cat([one.values for one in found], 2),
            torch.cat([one.logsumexp for one in found], 2),
        )

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> Attended:
        scores = torch.matmul((query * self.scaling).float(), keys.float().transpose(2, 3))
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores += mask
        largest = scores.amax(-1, keepdim=True)
        if mask is not None:  # or the weights of a query that attends to nothing would be NaN
            largest = largest.clamp_(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        logsumexp = largest.add_(total.log()).squeeze(-1)
        if mask is not None:
            total = total.clamp_(min=torch.finfo(torch.float32).tiny)
        if values.dtype is not torch.float32:  # the sum may be out of their range
            return Attended(torch.matmul(weights.div_(total).to(values.dtype), values), logsumexp)
        return Attended(torch.matmul(weights, values).div_(total), logsumexp)
