"""Operators of MLX."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
import torch

from genlm_backend.attention.operators import Operators


def _put(tensor: torch.Tensor, device: Any) -> mx.array:
    made = mx.array(tensor.numpy())
    return made.astype(mx.int32) if made.dtype == mx.int64 else made


def _lerp(first: mx.array, second: mx.array, share: mx.array) -> mx.array:
    return first + share * (second - first)


def _products(query: mx.array, keys: mx.array, scaling: float) -> mx.array:
    return (query.astype(mx.float32) * scaling) @ keys.astype(mx.float32).swapaxes(2, 3)


def _means(weights: mx.array, total: mx.array, values: mx.array) -> mx.array:
    return (weights @ values.astype(mx.float32)) / total


MLX: Final[Operators[mx.array]] = Operators(
    put=_put,
    device_of=lambda array: None,  # all devices have one memory
    concat=mx.concatenate,
    zeros_like=mx.zeros_like,
    as_type_of=lambda array, other: array.astype(other.dtype),
    fill_=lambda array, mask, value: mx.where(mask, value, array),
    at_least_=mx.maximum,
    exp_=mx.exp,
    tanh_=mx.tanh,
    log=mx.log,
    logaddexp=mx.logaddexp,
    sigmoid=mx.sigmoid,
    lerp=_lerp,
    largest=lambda scores: scores.max(-1, keepdims=True),
    total=lambda weights: weights.sum(-1, keepdims=True),
    products=_products,
    means_=_means,
    # MLX's own attention does not tell the sums that blocks are merged by.
    fused=lambda *_: None,
    fused_causally=lambda *_: None,
)
"""The operators of MLX, whose sums are in float32 whatever the type of keys and values."""
