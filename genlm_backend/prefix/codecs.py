"""Number formats of cached keys and values: as computed, another float type, int8, uint4."""

from __future__ import annotations

import abc
import functools
import math
from typing import Final, Literal, TypeAlias, final, get_args

import torch

from genlm_backend.errors import OptionError


class Codec(abc.ABC):
    """A number format of rows ``[width]``: one token's keys and values in a layer, concatenated."""

    is_exact = False
    """Whether ``decode(encode(rows))`` returns ``rows`` itself, uncopied."""

    # A row consists of vectors of ``dim`` elements: heads' keys and values, or parts of them.
    # A token's codes must depend only on its row. Zero codes must decode to finite numbers.
    def __init__(self, width: int, dim: int, dtype: torch.dtype) -> None:
        self.width, self.dim, self.dtype = width, dim, dtype

    @abc.abstractmethod
    def columns(self) -> tuple[tuple[int, torch.dtype], ...]:
        """Return the width and dtype of a token's row in each tensor of codes."""

    @abc.abstractmethod
    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the codes of ``rows``: one tensor ``[n, …]`` for each entry of ``columns``."""

    @abc.abstractmethod
    def decode(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the rows of ``codes``, ``dtype [n, width]``; rounded unless ``is_exact``."""

    @property
    def bytes_per_token(self) -> int:
        return sum(width * dtype.itemsize for width, dtype in self.columns())


GROUP_SIZE: Final = 32
"""Largest number of elements of a vector that share a scale and a zero point."""

_LARGEST: Final = 15
_FARTHEST_ZERO: Final = 127
_SHARES: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's range to try: a smaller share has finer steps and clips the ends."""


@final
class UInt4(Codec):
    """Stores vectors as 4-bit integers; up to 32 elements share a scale and a zero point."""

    # ``x ≈ mean + R (scale * (q + zero))``, ``q`` from 0 to 15, ``zero`` from -127 to 127, the
    # scale in bfloat16: asymmetric quantisation, per token (KIVI: Liu et al., 2024,
    # arXiv:2402.02750, section 3). ``encode`` first subtracts ``mean``, the mean key, and rotates
    # blocks of each vector by a Hadamard matrix ``R``, so that no channel is much larger than the
    # others (QuaRot: Ashkboos et al., 2024, arXiv:2404.00456, section 4). If one element of a block
    # is infinite or NaN, no element of the block decodes to a finite number.
    def __init__(
        self, width: int, dim: int, dtype: torch.dtype, mean: torch.Tensor | None = None
    ) -> None:
        super().__init__(width, dim, dtype)
        if dim % 2:
            raise OptionError(f"uint4 needs heads with an even number of elements, got {dim}")
        self._mean = mean
        self._group_size = math.gcd(dim, GROUP_SIZE)
        self._num_groups = width // self._group_size

    def columns(self) -> tuple[tuple[int, torch.dtype], ...]:
        num_groups = self._num_groups
        return (
            (self.width // 2, torch.uint8),
            (num_groups, torch.bfloat16),
            (num_groups, torch.int8),
        )

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = rows.float()
        if self._mean is not None:
            rows = rows - self._mean
        groups = self._rotated(rows).view(len(rows), self._num_groups, self._group_size)
        integers, scales, zeros = _quantised(groups)
        flat = integers.view(len(rows), self.width)
        half = self.width // 2
        return flat[:, :half] | flat[:, half:] << 4, scales, zeros

    def decode(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        pairs, scales, zeros = codes
        half = self.width // 2
        flat = torch.empty(len(pairs), self.width, dtype=torch.float32, device=pairs.device)
        flat[:, :half] = pairs & _LARGEST
        flat[:, half:] = pairs >> 4
        groups = flat.view(len(pairs), self._num_groups, self._group_size)
        groups += zeros.unsqueeze(-1)
        groups *= scales.float().unsqueeze(-1)
        rows = self._rotated(flat)
        if self._mean is not None:
            rows += self._mean
        return rows.to(self.dtype)

    def _rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows, each block of elements multiplied by a matrix that is its own inverse."""
        size = self.dim & -self.dim  # the largest power of two that divides ``dim``
        return (rows.reshape(-1, size) @ hadamard(size, rows.device)).view(rows.shape)


def _quantised(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise groups, float32 ``[n, groups, size]``; return integers, scales and zero points."""
    low, high = groups.amin(-1), groups.amax(-1)
    middle, radius = (low + high) / 2, (high - low) / 2
    # The least scale whose zero point stays within 127; 1 % more, since bfloat16 rounds scales.
    farthest = torch.maximum(low.abs(), high.abs()) * (1.01 / _FARTHEST_ZERO)
    best: tuple[torch.Tensor, ...] | None = None
    for share in _SHARES:  # each group takes the range with the least squared error
        scales = torch.maximum(2 * share * radius / _LARGEST, farthest).bfloat16()
        inverse = torch.where(scales > 0, 1 / scales.float(), 0)
        zeros = (
            ((middle - share * radius) * inverse).round_().clamp_(-_FARTHEST_ZERO, _FARTHEST_ZERO)
        )
        multiples = groups * inverse.unsqueeze(-1) - zeros.unsqueeze(-1)
        integers = multiples.round().clamp_(0, _LARGEST)
        errors = (multiples.sub_(integers)).square_().sum(-1) * scales.float().square()
        found = integers, scales, zeros, errors
        if best is None:
            best = found
            continue
        is_better = errors < best[3]
        best = (
            torch.where(is_better.unsqueeze(-1), integers, best[0]),
            *(
                torch.where(is_better, new, old)
                for new, old in zip(found[1:], best[1:], strict=True)
            ),
        )
    assert best is not None
    integers, scales, zeros, _ = best
    return integers.nan_to_num_().to(torch.uint8), scales, zeros.nan_to_num_().to(torch.int8)


@functools.cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Return Sylvester's symmetric orthogonal matrix ``[size, size]``; size: a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(size)).to(device)


_LARGEST_INT8: Final = 127
_SMALLEST: Final = 1e-30
"""Lower bound on a vector's largest absolute value, so that no vector is divided by zero."""


@final
class Int8(Codec):
    """Stores every ``dim`` elements as 8-bit integers and one scale: ``x ≈ scale * q``."""

    def columns(self) -> tuple[tuple[int, torch.dtype], ...]:
        return (self.width, torch.int8), (self.width // self.dim, torch.float32)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vectors = rows.reshape(len(rows), -1, self.dim).float()
        # Symmetric quantisation by the largest absolute value (Jacob et al., 2018,
        # arXiv:1712.05877, section 2.1, with a zero point of 0). If one element of a vector is
        # infinite or NaN, no element of the vector decodes to a finite number.
        scales = vectors.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST).div_(_LARGEST_INT8)
        integers = vectors.div(scales).round_().to(torch.int8)
        return integers.view(len(rows), -1), scales.squeeze(-1)

    def decode(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        integers, scales = codes
        vectors = integers.view(*scales.shape, self.dim).float()
        vectors *= scales.unsqueeze(-1)
        return vectors.to(self.dtype).view(integers.shape)


@final
class Cast(Codec):
    """Stores keys and values as computed, or rounded to another floating-point type."""

    def __init__(self, width: int, dim: int, dtype: torch.dtype, kept: torch.dtype) -> None:
        super().__init__(width, dim, dtype)
        self._kept, self.is_exact = kept, kept is dtype
        self._largest = torch.finfo(kept).max

    def columns(self) -> tuple[tuple[int, torch.dtype], ...]:
        return ((self.width, self._kept),)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round finite elements to the stored type's finite numbers; keep infinities and NaN."""
        if self.is_exact:
            return (rows,)
        if self._largest < torch.finfo(self.dtype).max:
            # Finite numbers beyond the type's range saturate; a plain cast would make infinities.
            inside = rows.clamp(-self._largest, self._largest)
            rows = torch.where(rows.isinf(), rows, inside)
        return (rows.to(self._kept),)

    def decode(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return codes[0] if self.is_exact else codes[0].to(self.dtype)


KVCacheDtype: TypeAlias = Literal["bfloat16", "float16", "int8", "uint4"]
"""Name of a number format of keys and values."""

KV_CACHE_DTYPES: Final[tuple[KVCacheDtype, ...]] = get_args(KVCacheDtype)
"""All named formats, in order of decreasing size; the first two are equally large."""


def needs_mean(kept: KVCacheDtype | None) -> bool:
    """Return whether a number format needs the mean key of each layer."""
    return kept == "uint4"


def codec_for(
    kept: KVCacheDtype | None,
    width: int,
    dim: int,
    dtype: torch.dtype,
    mean: torch.Tensor | None = None,
) -> Codec:
    match kept:
        case "int8":
            return Int8(width, dim, dtype)
        case "uint4":
            return UInt4(width, dim, dtype, mean)
        case _:
            return Cast(width, dim, dtype, dtype if kept is None else getattr(torch, kept))
