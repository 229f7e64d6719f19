"""Finds whether MLX is installed, without importing it."""

from __future__ import annotations

import importlib.util
import sys

from genlm_backend.errors import MissingExtraError


def is_present() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("mlx", "mlx_lm"))


def is_default() -> bool:
    """Return whether MLX is the default backend: on macOS with MLX and mlx-lm installed."""
    return sys.platform == "darwin" and is_present()


def check_present() -> None:
    """Raise a ``MissingExtraError`` if MLX or mlx-lm is not installed."""
    if not is_present():
        raise MissingExtraError(
            "AsyncMlxLM needs MLX and mlx-lm: pip install 'genlm-backend[mlx]'. AsyncTransformer "
            "(backend 'hf') runs the same programs."
        )
