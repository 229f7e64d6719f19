"""SlotLayer: what a model of transformers takes for one layer of its cache."""

from __future__ import annotations

import abc
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer of a cache whose keys and values are in slots.

    Whatever windows a model slides over it, it is not a sliding layer: masks are made for all
    positions.

    Args:
        num_past: Number of columns before the new tokens.
    """

    is_sliding = False

    def __init__(self, num_past: int) -> None:
        super().__init__()
        self.num_past = num_past
        self.is_initialized = True

    @abc.abstractmethod
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, ``[B, heads, Q, dim]``; return what is to be attended to."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the slots exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of past and new together, and the offset of the first column: 0."""
        return self.num_past + int(query_length), 0

    def get_seq_length(self) -> int:
        """Return the number of columns before the new tokens."""
        return self.num_past

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1
