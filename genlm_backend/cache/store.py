"""KVStore: the bytes of keys and values, one token a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch

from genlm_backend.cache.slots import PADDING_SLOT


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The shape of one token's keys and values in one attention layer.

    Attributes:
        num_key_heads: Number of heads of the keys.
        key_dim: Number of elements of one head's key.
        num_value_heads: Number of heads of the values.
        value_dim: Number of elements of one head's value; may differ from ``key_dim`` (latent
            attention).
        dtype: Type of the elements of both.
        device: Device on which the layer runs, and its slots live.
    """

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_slot(self) -> int:
        """Number of bytes of one token's keys and values in this layer."""
        elements = self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
        return elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shapes of all layers, first to last; none where a model keeps no keys and values."""

    layers: tuple[LayerLayout, ...] = ()

    @property
    def bytes_per_slot(self) -> int:
        """Number of bytes of one token's keys and values across all layers."""
        return sum(layer.bytes_per_slot for layer in self.layers)

    def num_slots(self, budget: int) -> int:
        """Return how many slots ``budget`` bytes hold beside the one for padding."""
        return max(0, budget // self.bytes_per_slot - 1) if self.layers else 0


@final
class KVStore:
    """Preallocated keys and values of every slot, in every layer.

    On a CPU the operating system provides the memory page by page as slots are first written,
    so that an unused budget costs nothing.

    Args:
        layout: The shapes of the layers.
        num_slots: Number of slots, beside the one for padding.

    Attributes:
        layout: As given.
        bytes_per_slot: Number of bytes of one token's keys and values across all layers.
        keys: Keys by layer: ``[num_slots + 1, num_key_heads * key_dim]``.
        values: Values by layer: ``[num_slots + 1, num_value_heads * value_dim]``.
    """

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        self.layout = layout
        self.bytes_per_slot = layout.bytes_per_slot
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer in layout.layers:
            for buffers, width in (
                (self.keys, layer.num_key_heads * layer.key_dim),
                (self.values, layer.num_value_heads * layer.value_dim),
            ):
                shape = (num_slots + 1, width)
                buffer = torch.empty(shape, dtype=layer.dtype, device=layer.device)
                buffer[PADDING_SLOT] = 0
                buffers.append(buffer)

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the keys and values of some tokens in one layer.

        Args:
            layer: The layer's index.
            slots: Where each token goes: int64 ``[n]`` on the layer's device.
            keys: Its key, all heads in a row: ``[n, num_key_heads * key_dim]``.
            values: Its value: ``[n, num_value_heads * value_dim]``.
        """
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of some slots in one layer, shaped as in ``write``.

        Args:
            layer: The layer's index.
            slots: Which: int64 ``[n]`` on the layer's device, as often as wanted each, of which
                copies are returned; or a slice of them, of which views are.
        """
        if isinstance(slots, slice):
            return self.keys[layer][slots], self.values[layer][slots]
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)

    def is_finite(self, slots: Sequence[int]) -> bool:
        """Return whether no key and no value of these slots is infinite or NaN."""
        index = torch.tensor(slots, dtype=torch.int64)
        return all(
            bool(buffer[index.to(buffer.device)].isfinite().all())
            for buffer in chain(self.keys, self.values)
        )
