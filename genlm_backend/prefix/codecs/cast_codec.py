"""Exact and Cast: keys and values as the model computes them, or in another floating-point type."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from genlm_backend.prefix.codecs.codec import Codec


@final
class Exact(Codec):
    """Keeps keys and values as the model computes them."""

    is_exact: ClassVar[bool] = True

    def columns(self) -> tuple[tuple[int, torch.dtype], ...]:
        return ((self.width, self.dtype),)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows,)

    def decode(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the very tensor of the rows."""
        return codes[0]


@final
class Cast(Codec):
    """Keeps keys and values in another floating-point type, each element rounded to the nearest."""

    def __init__(self, width: int, dim: int, dtype: torch.dtype, kept: torch.dtype) -> None:
        super().__init__(width, dim, dtype)
        self._kept = kept
        self._largest = torch.finfo(kept).max

    def columns(self) -> tuple[tuple[int, torch.dtype], ...]:
        return ((self.width, self._kept),)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round the elements; an infinity stays one, as does a NaN."""
        if self._largest < torch.finfo(self.dtype).max:
            # Finite numbers beyond the range of the type become its largest, not infinite.
            inside = rows.clamp(-self._largest, self._largest)
            rows = torch.where(rows.isinf(), rows, inside)
        return (rows.to(self._kept),)

    def decode(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return codes[0].to(self.dtype)
