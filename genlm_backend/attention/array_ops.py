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
class ArrayOps(Generic[A]):
    """The operators of one library; those that end in ``_`` may overwrite their first argument."""

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
    fused: Callable[[A, A, A, float, A | None], tuple[A, A] | None]
    fused_causally: Callable[[A, A, A, float, int], tuple[A, A] | None]
