"""CellStore: the keys and values of slots, which are in llama.cpp's own memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.packing import PackedBatch
from genlm_backend.prefix import KVLayout


@final
class CellStore:
    """The store of a prefix cache whose keys and values llama.cpp keeps."""

    layout = KVLayout()

    def __init__(self, bytes_per_slot: int) -> None:
        self.bytes_per_slot = bytes_per_slot

    def is_finite(self, slots: Any) -> bool:
        """Return ``True``: what has overflown is seen by the rows behind it."""
        return True


@final
class CellAttend(Attend[None]):
    """The way to attend of llama.cpp: to the cells of a row's sequence."""

    @contextlib.contextmanager
    def attending(self, batch: PackedBatch, model: Any) -> Iterator[None]:
        """Do nothing: llama.cpp finds a row's cells by its sequence."""
        yield
