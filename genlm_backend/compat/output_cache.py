"""OutputCache: an LRU cache of a bounded number of tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import final

import torch

from genlm_backend.checks import integer, switch


@final
class OutputCache:
    """A mapping from keys to tensors that evicts the least recently used tensors.

    It serves programs written for genlm-backend 0.3.1. The models of this library cache their
    next-token rows in a ``RowCache`` instead, whose bound is in bytes.

    Args:
        maxsize: Largest number of tensors to keep.
        move_to_cpu: Whether to keep tensors in main memory; lookups return them on their original
            device.

    Raises:
        OptionTypeError: (``TypeError``) If an argument has a wrong type.
        OptionError: (``ValueError``) If ``maxsize`` is negative.
    """

    def __init__(self, maxsize: int, move_to_cpu: bool = False) -> None:
        self.maxsize = integer(0)("maxsize", maxsize)
        self.move_to_cpu = switch("move_to_cpu", move_to_cpu)
        self.cache: OrderedDict[Hashable, tuple[torch.device, torch.Tensor]] = OrderedDict()

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        device, tensor = self.cache[key]
        self.cache.move_to_end(key)
        return tensor.to(device)

    def __setitem__(self, key: Hashable, value: torch.Tensor) -> None:
        self.cache[key] = (value.device, value.cpu() if self.move_to_cpu else value)
        self.cache.move_to_end(key)
        while len(self.cache) > self.maxsize:
            self.cache.popitem(last=False)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.cache

    def __len__(self) -> int:
        return len(self.cache)

    def clear(self) -> None:
        """Evict every tensor."""
        self.cache.clear()
