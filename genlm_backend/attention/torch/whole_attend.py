"""WholeAttend: contexts that are run whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.torch.layer import Pair, SlotLayer, by_head, by_token
from genlm_backend.attention.torch.torch_row_states import cache_of
from genlm_backend.prefix import KVLayout, LayerLayout, StateLayout


@final
class WholeAttend(Attend[dict[str, Any]]):
    """Attends to the new tokens alone: there are none before them, and nothing is kept."""

    def __init__(self, layout: KVLayout | None = None) -> None:
        layers = () if layout is None else layout.layers
        self._rounding = [layer for layer in layers if layer.kept is not None]
        self._states = StateLayout() if layout is None else layout.states

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[dict[str, Any]]:
        """Yield a mask of the right padding, int64 ``[B, Q]``."""
        columns = np.arange(batch.input_ids.shape[1])
        mask = torch.from_numpy((columns < batch.num_new[:, None]).astype(np.int64))
        if not self._rounding:
            yield {"attention_mask": mask, "use_cache": False}
            return
        cache = cache_of(map(_RoundedLayer, self._rounding), self._states, None)
        yield {"attention_mask": mask, "cache": cache, "use_cache": True}


@final
class _RoundedLayer(SlotLayer):
    """One layer: new keys and values come out as they would be read from a store."""

    def __init__(self, layout: LayerLayout) -> None:
        super().__init__(0)
        self._codec = layout.codec()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Return ``[B, heads, Q, dim]``, keys and values."""
        codes = self._codec.encode(by_token(key_states, value_states, None))
        return by_head(self._codec.decode(codes), None, key_states, value_states)
