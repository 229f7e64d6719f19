"""MlxWholeAttend: contexts that are run whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.mlx.mlx_attend import Caches
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.prefix.mlx_store import LayerShape


@final
class MlxWholeAttend(Attend[Caches]):
    """Attends to the new tokens alone: there are none before them, and nothing is kept.

    The model has caches of its own, new ones: some layers read what others have put there.
    """

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[Caches]:
        """Yield the model's own caches, empty."""
        yield make_prompt_cache(model)


@final
class ShapeLayer:
    """A cache that only notes the shapes of keys and values that it is given."""

    offset = 0
    shape: LayerShape | None = None

    def make_mask(self, N: int, return_array: bool = False, **_: Any) -> Any:
        """Return the causal mask of a pass that has nothing before it."""
        return mx.array(np.tri(N, dtype=bool)) if return_array else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return them as they are."""
        if keys.shape[1] == values.shape[1] and self.shape is None:
            self.shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return keys, values
