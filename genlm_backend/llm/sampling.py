"""Sampler: one random stream that draws tokens from rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class Sampler:
    """Draws from log-probability rows by inverting their cumulative distribution.

    A draw uses one random number, whatever else is drawn elsewhere, so that equal seeds give equal
    continuations in any company.

    Args:
        temperature: Divides the log-probabilities; 0 takes the largest.
        seed: Equal seeds and streams give equal draws from equal rows; ``None`` draws afresh.
        stream: Which of the independent streams of ``seed``.

    Raises:
        ValueError: If ``temperature`` is negative or not a number.
    """

    def __init__(self, temperature: float = 1.0, seed: int | None = None, stream: int = 0) -> None:
        if not temperature >= 0:
            raise ValueError(f"temperature must be zero or more, got {temperature}")
        self.temperature = temperature
        entropy = None if seed is None else [seed, stream]
        self._random = np.random.default_rng(entropy)

    def draw(self, row: torch.Tensor) -> int:
        """Return a token id drawn from ``row``, float ``[vocab]``, normalised or not."""
        if self.temperature == 0:
            return int(row.argmax())
        scores = row.detach().cpu().float().numpy()
        if self.temperature != 1:
            scores = scores / np.float32(self.temperature)
        return invert(np.exp(scores - scores.max()), self._random.random())


_NUM_BLOCKS = 256


def invert(weights: NDArray[np.float32], point: float) -> int:
    """Return the index where the cumulative sum of ``weights`` passes ``point`` of the whole.

    Sums of blocks are searched first and one block after them, because a running sum over a
    vocabulary takes several times as long as a plain one.

    Args:
        weights: Zero or more each, not all zero, ``[n]``.
        point: From 0 up to, and not including, 1.
    """
    size = len(weights) // _NUM_BLOCKS
    if size < 2:
        return _search(np.cumsum(weights, dtype=np.float64), weights, point)
    whole = size * _NUM_BLOCKS
    sums = weights[:whole].reshape(_NUM_BLOCKS, size).sum(1, dtype=np.float64)
    sums = np.append(sums, weights[whole:].sum(dtype=np.float64))
    ends = np.cumsum(sums)
    block = _search(ends, sums, point)
    begin = ends[block] - sums[block]
    part = weights[block * size : (block + 1) * size] if block < _NUM_BLOCKS else weights[whole:]
    inside = (point * ends[-1] - begin) / sums[block]
    return block * size + _search(np.cumsum(part, dtype=np.float64), part, inside)


def _search(ends: NDArray[np.float64], weights: NDArray[np.floating], point: float) -> int:
    # An interval of width zero is never found when one searches on the right.
    index = int(np.searchsorted(ends, point * ends[-1], side="right"))
    # Rounding may put the point behind the last interval that has any width.
    return index if index < len(ends) else int(np.flatnonzero(weights)[-1])
