"""Operators of torch, those that attend at once among them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from genlm_backend.attention.softmax_attention import ArrayOps, AttentionState
from genlm_backend.attention.torch.fused import Found, fused_operator

FEW_QUERIES: Final = 16
"""Queries up to which keys are parted: the fused operator has one thread for each head of them."""

NUM_STRETCHES: Final = 4
"""Stretches that keys are parted into, each of which a thread takes."""

SHORTEST_STRETCH = 512
"""Keys that are worth a stretch."""


def _products(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    return torch.matmul((query * scaling).float(), keys.float().transpose(2, 3))


def _means(weights: Tensor, total: Tensor, values: Tensor) -> Tensor:
    if values.dtype is not torch.float32:  # the sum may be out of their range
        return torch.matmul(weights.div_(total).to(values.dtype), values)
    return torch.matmul(weights, values).div_(total)


def _fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    mask: Tensor | None,
    causal_group: int,
) -> Found | None:
    num_rows, num_groups, num_queries, dim = query.shape
    fused = fused_operator(query.device, query.dtype, dim) if dim == values.shape[-1] else None
    if fused is None:
        return None
    if causal_group:
        shape = num_rows, num_groups * causal_group, num_queries // causal_group, dim
        keys, values = (all_of.repeat_interleave(causal_group, 1) for all_of in (keys, values))
        found, logsumexp = fused.attend(query.reshape(shape), keys, values, scaling, True)
        shape = num_rows, num_groups, num_queries
        return found.reshape(*shape, found.shape[-1]), logsumexp.reshape(shape)
    if mask is not None:
        attend_with = fused.attend_with
        return None if attend_with is None else attend_with(query, keys, values, scaling, mask)
    size = keys.shape[2] // NUM_STRETCHES
    if (
        fused.is_parted
        and num_rows == 1
        and num_queries <= FEW_QUERIES
        and size >= SHORTEST_STRETCH
    ):
        return _in_stretches(fused.attend, query, keys, values, scaling, size)
    return fused.attend(query, keys, values, scaling, False)


def _in_stretches(
    attend: Callable[[Tensor, Tensor, Tensor, float, bool], Found],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    size: int,
) -> Found:
    """Attend from few queries to keys of which all threads take stretches at once."""
    stop = size * NUM_STRETCHES
    parted_keys, parted_values = (
        all_of[0, :, :stop].unflatten(1, (-1, size)).transpose(0, 1) for all_of in (keys, values)
    )
    queries = query.expand(NUM_STRETCHES, -1, -1, -1)
    found, logsumexp = attend(queries, parted_keys, parted_values, scaling, False)
    shares = logsumexp.softmax(0).unsqueeze(-1)
    merged = (found * shares).sum(0, keepdim=True).to(found.dtype)
    total = AttentionState(TORCH, merged, logsumexp.logsumexp(0, keepdim=True))
    if stop < keys.shape[2]:
        left = keys[:, :, stop:], values[:, :, stop:]
        total.merge_state(AttentionState(TORCH, *attend(query, *left, scaling, False)), None)
    return total.values, total.logsumexp


TORCH: Final[ArrayOps[Tensor]] = ArrayOps(
    lib=torch,
    put=lambda tensor, device: tensor.to(device),
    device_of=operator.attrgetter("device"),
    as_type_of=Tensor.type_as,
    fill_=Tensor.masked_fill_,
    at_least_=Tensor.clamp_,
    exp_=Tensor.exp_,
    tanh_=Tensor.tanh_,
    lerp=torch.lerp,
    largest=lambda scores: scores.amax(-1, keepdim=True),
    total=lambda weights: weights.sum(-1, keepdim=True),
    products=_products,
    means_=_means,
    fused=_fused,
)
"""The operators of torch, on any device."""
