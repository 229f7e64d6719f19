"""Attention of sequences of queries to stretches of a table, whose bounds are on the device.

No number of it is known to the processor, so that one recorded launch serves every decode step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

logger = logging.getLogger(__name__)

VarlenOperator: TypeAlias = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        int,
        int,
        float,
    ],
    tuple[torch.Tensor, torch.Tensor],
]
"""Attention of ``S`` sequences of queries, each to a stretch of keys and values.

Given are queries ``[N, heads, dim]``; keys and values ``[n, key_heads, dim]``, of which a group of
heads shares one; the bounds of the sequences among the queries, int32 ``[S + 1]``; where each
stretch begins, int32 ``[S + 1]`` of which the last is not read; its number of tokens, int32
``[S]``; the most queries of a sequence and tokens of a stretch; and what products are multiplied
by. Returned are weighted means ``[N, heads, dim]`` and the logarithms of the sums of the
exponentials of the scores, float32 ``[heads, N]``.
"""


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bounds: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-2 (Dao, 2023, arXiv:2307.08691): float16 and bfloat16."""
    found = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        bounds,
        starts,
        most_queries,
        most_keys,
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=counts,
    )
    return found[0], found[1]


OPERATORS: Final[dict[str, VarlenOperator]] = {"cuda": _flash}
"""Operators that there may be, by the kind of a device."""

_ROUNDING: Final = 3e-2


@functools.cache
def varlen_operator(
    device: torch.device, dtype: torch.dtype, dim: int, group_size: int
) -> VarlenOperator | None:
    """Return the operator for heads of ``dim`` elements; ``None`` where there is none.

    It is tried on random numbers, in the layout of a store and as decode steps call it, before it
    is used for a type, a size of head and a size of groups.
    """
    operator = OPERATORS.get(device.type)
    if operator is None:
        return None
    try:
        is_right = all(
            _distance(operator, device, dtype, dim, case) <= _ROUNDING
            for case in (
                ([1, 1, 1, 1], [1, 40, 7, 300], group_size),  # the rest of each row
                ([1], [900], group_size),
                ([150, 1, 0, 33], [700, 3, 0, 64], 1),  # parts, and room for more
            )
        )
    except Exception as error:  # whatever an operator raises of what it does not take
        logger.debug("no attention of sequences for %s of %s", dtype, dim, exc_info=error)
        return None
    return operator if is_right else None


@torch.inference_mode()
def _distance(
    operator: VarlenOperator,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    case: tuple[list[int], list[int], int],
) -> float:
    """Return the largest difference of an operator from the formula in float64."""
    num_queries, counts, group_size = case
    num_heads, generator = 2, torch.Generator().manual_seed(0)
    kept = torch.randn(1200, 2 * num_heads * dim, generator=generator, dtype=torch.float32)
    shape = sum(num_queries), num_heads * group_size, dim
    query = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    kept, scale = kept.to(dtype), 0.7 * dim**-0.5
    starts = [11, 60, 333, 501][: len(counts)]
    bounds = [sum(num_queries[:i]) for i in range(len(counts) + 1)]
    on_device = kept.to(device)
    found, sums = operator(
        query.to(device),
        *(part.unflatten(1, (num_heads, dim)) for part in on_device.chunk(2, 1)),
        *(
            torch.tensor(integers, dtype=torch.int32, device=device)
            for integers in (bounds, [*starts, 0], counts)
        ),
        max(num_queries),
        len(kept),
        scale,
    )
    keys, values = (part.unflatten(1, (num_heads, dim)).double() for part in kept.chunk(2, 1))
    largest = 0.0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        own, theirs = slice(*bounds[number : number + 2]), slice(start, start + count)
        if not num_queries[number]:
            continue
        grouped = query[own].double().unflatten(1, (num_heads, group_size))
        scores = torch.einsum("mhgd,nhd->hgmn", grouped, keys[theirs]) * scale
        means = torch.einsum("hgmn,nhd->mhgd", scores.softmax(-1), values[theirs])
        for one, expected in (
            (found[own], means.flatten(1, 2)),
            (sums[:, own], scores.logsumexp(-1).flatten(0, 1)),
        ):
            difference = (one.cpu().double() - expected).abs().max().nan_to_num(torch.inf)
            largest = max(largest, float(difference))
    return largest
