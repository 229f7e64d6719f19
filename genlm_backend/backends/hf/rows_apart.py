"""Rows of logits, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

_ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05}

MOST_ROUNDING: Final = 0.25
"""Rounding of bfloat16, and of quantised weights whatever they compute in."""


def rounding(dtype: torch.dtype) -> float:
    """Return the largest difference of rows that are computed in another order."""
    return _ROUNDING.get(dtype, MOST_ROUNDING)


def row_of(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities in float32, on the processor."""
    return logits.float().log_softmax(-1).cpu()


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the root mean square difference of two rows, or of all of two tables of them."""
    return float((first - second).square().mean().sqrt())


def farthest(distances: Iterable[float]) -> float:
    """Return the largest distance; NaN counts as infinite."""
    return max(math.inf if math.isnan(one) else one for one in distances)
