"""The bounds of the rows that a model keeps by ``cache_size`` and ``cache_opts``."""

from __future__ import annotations

from typing import Any

import torch

from genlm_backend.checks import byte_count, check_names, checked, mapping, optional, switch
from genlm_backend.model.row import RowCache

_CHECKS = {"max_bytes": optional(byte_count), "move_to_cpu": switch}


def cache_opts(name: str, value: Any) -> dict[str, Any]:
    """Return checked ``cache_opts``; a check."""
    options = mapping(name, value)
    check_names(options, _CHECKS, f"option of {name}")
    return checked(_CHECKS, options)


def row_cache(
    cache_size: int, row_cache_bytes: int, max_bytes: int | None = None, move_to_cpu: bool = False
) -> RowCache:
    """Return the cache that these options ask for."""
    return RowCache(
        row_cache_bytes if max_bytes is None else max_bytes,
        cache_size or None,
        torch.device("cpu") if move_to_cpu else None,
    )
