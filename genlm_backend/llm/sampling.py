"""Sampler: one random stream that draws tokens from rows."""

from __future__ import annotations

import numpy as np
import torch


class Sampler:
    """Draws from log-probability rows by inverting their cumulative distribution.

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
        """Return a token id drawn from ``row``, float ``[vocab]``."""
        if self.temperature == 0:
            return int(row.argmax())
        cumulative = (row.double() / self.temperature).softmax(-1).cumsum(-1)
        # A draw from [0, total) falls into no interval of width zero when searched on the right.
        point = self._random.random() * float(cumulative[-1])
        index = torch.searchsorted(cumulative, point, right=True)
        return min(int(index), len(row) - 1)
