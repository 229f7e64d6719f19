"""TierCopier: copies encoded keys and values, or recurrent states, between two pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias, final

import torch

from genlm_backend.prefix.slot_allocator import ranges_in_a_row

LONG_RANGE: Final = 16
"""Least mean length of runs of consecutive slots at which each run is copied as a slice."""


Codes: TypeAlias = Sequence[tuple[torch.Tensor, ...]]
"""The tensors of a pool: a tuple per layer, or one for all states; a row is a slot or a state."""


@final
class TierCopier:
    """Copies slots or states between pools of one layout, whose row 0 has the number ``first``."""

    def __init__(self, device: Codes, host: Codes, first: int = 0) -> None:
        self._device, self._host, self._first = device, host, first

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        self._copy(self._device, device_slots, self._host, host_slots)

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        self._copy(self._host, host_slots, self._device, device_slots)

    # Runs that are long on average are copied as slices, others by ``index_select``. A slice copy
    # between CUDA and pinned memory is asynchronous: later work on the stream runs after it.
    def _copy(
        self, source: Codes, from_slots: Sequence[int], to: Codes, to_slots: Sequence[int]
    ) -> None:
        wanted, places = (
            torch.tensor(slots, dtype=torch.int64) - self._first for slots in (from_slots, to_slots)
        )
        ranges = ranges_in_a_row(wanted.numpy(), places.numpy())
        is_long = len(from_slots) >= LONG_RANGE * len(ranges)
        for old, new in zip(source, to, strict=True):
            for codes, kept in zip(old, new, strict=True):
                if is_long:
                    waits_not = codes.is_cuda or kept.is_cuda
                    for first, stop in ranges:
                        start, at, size = int(wanted[first]), int(places[first]), stop - first
                        part = kept[at : at + size]
                        part.copy_(codes[start : start + size], non_blocking=waits_not)
                    continue
                # The CPU accesses host memory here, so earlier asynchronous copies must have ended.
                for tensor in (codes, kept):
                    if tensor.is_cuda:
                        torch.cuda.current_stream(tensor.device).synchronize()
                found = codes.index_select(0, wanted.to(codes.device)).to(kept.device)
                kept.index_copy_(0, places.to(kept.device), found)
