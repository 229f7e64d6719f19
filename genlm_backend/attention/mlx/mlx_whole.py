"""MlxWholeAttend: contexts that are run whole."""

from __future__ import annotations

import contextlib
from typing import Any, final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from genlm_backend.attention.mlx.mlx_attend import MlxAttend, as_caches
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.prefix.mlx_store import LayerShape


@final
class MlxWholeAttend(MlxAttend):
    """Attends to the new tokens alone: there are none before them, and nothing is kept.

    The model has caches of its own, new ones: some layers read what others have put there.
    """

    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> None:
        """Return ``None``: there is nothing to read."""

    def attending(
        self, batch: PackedBatch, model: Any
    ) -> contextlib.AbstractContextManager[list[Any] | None]:
        """Yield the model's own caches, empty."""
        return as_caches(make_prompt_cache(model))

    def keep(self, batch: PackedBatch, layers: list[Any] | None) -> None:
        """Do nothing."""


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
