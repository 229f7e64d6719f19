"""KVPool: the tensors of cached keys and values, one slot per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, final

import torch
from numpy.typing import NDArray

from genlm_backend.prefix.codecs import Codec, KVCacheDtype, codec_for
from genlm_backend.prefix.slot_allocator import PADDING_SLOT
from genlm_backend.prefix.state_cache import StateLayout

FREE_SLOTS: Final = 1 << 20
"""Number of slots if no layer attends. A slot takes no bytes then, but its tree node about 70."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The shape, number format and device of a token's keys and values in one attention layer."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    kept: KVCacheDtype | None = None
    mean_key: torch.Tensor | None = field(default=None, compare=False)

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def width(self) -> int:
        return self.key_width + self.num_value_heads * self.value_dim

    def codec(self) -> Codec:
        dim, mean = math.gcd(self.key_dim, self.value_dim), self.mean_key
        if mean is not None:
            mean = torch.nn.functional.pad(mean, (0, self.width - self.key_width))
        return codec_for(self.kept, self.width, dim, self.dtype, mean)

    @property
    def bytes_per_slot(self) -> int:
        return self.codec().bytes_per_token


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layouts of the keys, values and recurrent states that a model caches."""

    layers: tuple[LayerLayout, ...] = ()
    states: StateLayout = field(default_factory=StateLayout)

    @property
    def bytes_per_slot(self) -> int:
        return sum(layer.bytes_per_slot for layer in self.layers)

    def kept_as(
        self, kept: KVCacheDtype | None, mean_keys: Sequence[torch.Tensor] | None = None
    ) -> Self:
        means = mean_keys or [None] * len(self.layers)
        layers = [
            replace(layer, kept=kept, mean_key=mean)
            for layer, mean in zip(self.layers, means, strict=True)
        ]
        for layer in layers:
            layer.codec()
        return replace(self, layers=tuple(layers))

    def on_host(self) -> Self:
        host = torch.device("cpu")
        layers = tuple(replace(layer, device=host) for layer in self.layers)
        return replace(self, layers=layers, states=self.states.on_host())

    @property
    def devices(self) -> set[str]:
        return {each.device.type for each in (*self.layers, *self.states.tensors)}

    def num_slots(self, budget: int) -> int:
        """Return how many slots fit into ``budget`` bytes besides the padding slot."""
        # If no layer attends, slots take no bytes, and their number only bounds the tree.
        if not self.layers:
            return FREE_SLOTS if self.states else 0
        return max(0, budget // self.bytes_per_slot - 1)


@final
class KVPool:
    """Preallocated tensors for the keys and values of every slot in every attention layer."""

    def __init__(self, layout: KVLayout, num_slots: int, pins: bool = False) -> None:
        self.layout = layout
        self.bytes_per_slot = layout.bytes_per_slot
        self._codecs = [layer.codec() for layer in layout.layers]
        self.is_exact = all(codec.is_exact for codec in self._codecs)
        # The OS provides memory on the first write, so unused CPU slots take none unless pinned.
        self.codes = [
            _empty(codec, num_slots + 1, layer.device, pins)
            for layer, codec in zip(layout.layers, self._codecs, strict=True)
        ]

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        codec = self._codecs[layer]
        new = codec.encode(rows)
        for codes, of_tokens in zip(self.codes[layer], new, strict=True):
            codes.index_copy_(0, slots, of_tokens)
        return codec.decode(new)

    def read(self, layer: int, slots: torch.Tensor | slice) -> torch.Tensor:
        """Return keys and values of slots in one layer, concatenated: ``[n, width]``."""
        codes = self.codes[layer]
        if isinstance(slots, slice):
            found = tuple(of_slots[slots] for of_slots in codes)
        else:
            found = tuple(of_slots.index_select(0, slots) for of_slots in codes)
        return self._codecs[layer].decode(found)

    def read_by_head(
        self, layer: int, slots: torch.Tensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[B, heads, n, dim]`` of slots ``[B, n]``, or a slice (B = 1)."""
        num_rows, which = (1, slots) if isinstance(slots, slice) else (len(slots), slots.view(-1))
        rows, shape = self.read(layer, which), self.layout.layers[layer]
        keys, values = rows.tensor_split([shape.num_key_heads * shape.key_dim], 1)
        keys = keys.view(num_rows, -1, shape.num_key_heads, shape.key_dim)
        values = values.view(num_rows, -1, shape.num_value_heads, shape.value_dim)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def take_rows(self, slots: Sequence[int] | NDArray[Any]) -> list[tuple[torch.Tensor, ...]]:
        """Return copies of the codes of slots, by layer, in CPU memory."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        return [
            tuple(codes.index_select(0, index.to(codes.device)).cpu() for codes in of_layer)
            for of_layer in self.codes
        ]

    def put(
        self, slots: Sequence[int] | NDArray[Any], codes: Sequence[tuple[torch.Tensor, ...]]
    ) -> None:
        """Fill slots with codes from ``take_rows`` of a pool with the same layout."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        for kept, new in zip(self.codes, codes, strict=True):
            for of_slots, of_tokens in zip(kept, new, strict=True):
                places = index.to(of_slots.device)
                of_slots.index_copy_(0, places, of_tokens.to(of_slots.device))

    def is_finite(self, slots: Sequence[int] | NDArray[Any]) -> bool:
        """Return whether all keys and values of these slots are finite."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        return all(
            bool(self.read(number, index.to(layer.device)).isfinite().all())
            for number, layer in enumerate(self.layout.layers)
        )


def _empty(
    codec: Codec, num_rows: int, device: torch.device, pins: bool
) -> tuple[torch.Tensor, ...]:
    kept: list[torch.Tensor] = []
    for width, dtype in codec.columns():
        codes = torch.empty((num_rows, width), dtype=dtype, device=device, pin_memory=pins)
        codes[PADDING_SLOT] = 0
        kept.append(codes)
    return tuple(kept)
