"""Ways to keep the keys and values of a token."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import torch

from genlm_backend.prefix.codecs.codec import Codec
from genlm_backend.prefix.codecs.formats import Cast, Exact, Int8, UInt4

KVCacheDtype: TypeAlias = Literal["bfloat16", "float16", "int8", "uint4"]
"""Name of a number format of keys and values."""

KV_CACHE_DTYPES: Final[tuple[KVCacheDtype, ...]] = get_args(KVCacheDtype)
"""All of them, from the most exact to the smallest."""


_CODECS: Final[dict[KVCacheDtype, type[Codec]]] = {
    "bfloat16": Cast,
    "float16": Cast,
    "int8": Int8,
    "uint4": UInt4,
}


def needs_mean(kept: KVCacheDtype | None) -> bool:
    """Return whether a number format needs the mean of keys, which is computed once."""
    return kept is not None and _CODECS[kept].needs_mean


def codec_for(
    kept: KVCacheDtype | None,
    width: int,
    dim: int,
    dtype: torch.dtype,
    mean: torch.Tensor | None = None,
) -> Codec:
    if kept is None or getattr(torch, kept) is dtype:
        return Exact(width, dim, dtype)
    match kept:
        case "int8":
            return Int8(width, dim, dtype)
        case "uint4":
            return UInt4(width, dim, dtype, mean)
        case "bfloat16" | "float16":
            return Cast(width, dim, dtype, getattr(torch, kept))


__all__ = ["KV_CACHE_DTYPES", "Codec", "KVCacheDtype", "codec_for", "needs_mean"]
