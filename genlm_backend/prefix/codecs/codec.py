"""Codec: how the keys and values of one token are kept."""

from __future__ import annotations

import abc

import torch


class Codec(abc.ABC):
    """A way to store keys and values of one layer: ``[n, width]`` rows of vectors, side by side."""

    is_exact = False
    """Whether what is decoded is what was coded, and a view of it."""

    # A token's codes depend on its own row alone. Codes of zeros decode to finite numbers.
    def __init__(self, width: int, dim: int, dtype: torch.dtype) -> None:
        self.width, self.dim, self.dtype = width, dim, dtype

    @abc.abstractmethod
    def columns(self) -> tuple[tuple[int, torch.dtype], ...]:
        """Return the width and the type of a token's row in each tensor of codes."""

    @abc.abstractmethod
    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the codes of rows, ``dtype [n, width]``: as many tensors as ``columns`` names."""

    @abc.abstractmethod
    def decode(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the keys and values of codes: ``dtype [n, width]``."""

    @property
    def bytes_per_token(self) -> int:
        return sum(width * dtype.itemsize for width, dtype in self.columns())
