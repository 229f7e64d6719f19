"""Int8: eight bits for each element, and a scale for each vector."""

from __future__ import annotations

from typing import Final, final

import torch

from genlm_backend.prefix.codecs.codec import Codec

_LARGEST: Final = 127
_SMALLEST: Final = 1e-30
"""Least that a vector's largest element counts as, so that zeros are not divided by zero."""


@final
class Int8(Codec):
    """Keeps each vector as integers of eight bits and one scale: ``x ≈ scale * q``."""

    def columns(self) -> tuple[tuple[int, torch.dtype], ...]:
        return (self.width, torch.int8), (self.width // self.dim, torch.float32)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vectors = rows.reshape(len(rows), -1, self.dim).float()
        # Symmetric quantisation by the largest absolute value (Jacob et al., 2018,
        # arXiv:1712.05877, section 2.1, with a zero point of 0), of one head and token each. A
        # vector with an infinity or a NaN decodes to no finite number.
        scales = vectors.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST).div_(_LARGEST)
        integers = vectors.div(scales).round_().to(torch.int8)
        return integers.view(len(rows), -1), scales.squeeze(-1)

    def decode(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        integers, scales = codes
        vectors = integers.view(*scales.shape, self.dim).float()
        vectors *= scales.unsqueeze(-1)
        return vectors.to(self.dtype).view(integers.shape)
