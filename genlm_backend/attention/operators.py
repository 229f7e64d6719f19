"""Operators on the arrays of one library, over which the ways to attend are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch

A = TypeVar("A", bound=Any)
"""An array of some library: ``torch.Tensor`` or ``mx.array``, indexed and reshaped alike."""


@final
@dataclass(frozen=True, slots=True)
class Operators(Generic[A]):
    """The operators of one library.

    Those whose name ends in ``_`` may overwrite their first argument, which nobody else has.

    Attributes:
        put: Copies a tensor of the processor to a device.
        device_of: Returns where an array is.
        concat: Joins arrays along an axis.
        zeros_like: Returns zeros in the shape of an array.
        as_type_of: Converts elements to the type of those of another array.
        fill_: Puts a number where a mask of bools says.
        at_least_: Raises what is below a number.
        exp_: Exponentials.
        tanh_: Hyperbolic tangents.
        log: Logarithms.
        logaddexp: Logarithm of the sum of the exponentials of two arrays.
        sigmoid: Logistic function.
        lerp: Goes from one array towards another by a share of the way.
        largest: Largest element of the last axis, which stays.
        total: Sum of the last axis, which stays.
        products: From queries ``[N, heads, M, dim]``, keys ``[N, heads, n, dim]`` and what products
            are multiplied by, to scores: float32 ``[N, heads, M, n]``, which nobody else has.
        means_: From weights ``[N, heads, M, n]``, their sums ``[N, heads, M, 1]`` and values ``[N,
            heads, n, value_dim]`` to weighted means, ``[N, heads, M, value_dim]``.
        fused: All of attention to a block at once, for queries of which each attends to something:
            from queries, keys, values, what products are multiplied by, and what is added to
            scores, float32 ``[N, 1, M, n]`` or ``None``, to weighted means and float32 logarithms
            of the sums, ``[N, heads, M]``. ``None`` where there is no such operator that is right.
        fused_causally: The same from each of ``Q`` tokens to itself and to those before it, for
            queries ``[N, heads, group * Q, dim]``, heads of a group one after another; given the
            size of a group in the place of the last argument.
    """

    put: Callable[[torch.Tensor, Any], A]
    device_of: Callable[[A], Any]
    concat: Callable[[list[A], int], A]
    zeros_like: Callable[[A], A]
    as_type_of: Callable[[A, A], A]
    fill_: Callable[[A, A, float], A]
    at_least_: Callable[[A, float], A]
    exp_: Callable[[A], A]
    tanh_: Callable[[A], A]
    log: Callable[[A], A]
    logaddexp: Callable[[A, A], A]
    sigmoid: Callable[[A], A]
    lerp: Callable[[A, A, A], A]
    largest: Callable[[A], A]
    total: Callable[[A], A]
    products: Callable[[A, A, float], A]
    means_: Callable[[A, A, A], A]
    fused: Callable[[A, A, A, float, A | None], tuple[A, A] | None]
    fused_causally: Callable[[A, A, A, float, int], tuple[A, A] | None]
