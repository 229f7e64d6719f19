"""Ways to keep the keys and values of a token."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import torch

from genlm_backend.prefix.codecs.codec import Codec
from genlm_backend.prefix.codecs.formats import Cast, Int8, UInt4

KVCacheDtype: TypeAlias = Literal["bfloat16", "float16", "int8", "uint4"]
"""Name of a number format of keys and values."""

KV_CACHE_DTYPES: Final[tuple[KVCacheDtype, ...]] = get_args(KVCacheDtype)
"""All of them, from the most exact to the smallest."""


def needs_mean(kept: KVCacheDtype | None) -> bool:
    """Return whether a number format needs the mean of keys, which is computed once."""
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


__all__ = ["KV_CACHE_DTYPES", "Codec", "KVCacheDtype", "codec_for", "needs_mean"]
