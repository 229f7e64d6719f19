"""RowCache: log-probability rows by context, bounded by bytes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar, final

import torch

from genlm_backend.checks import byte_count, integer, optional
from genlm_backend.checks import device as check_device
from genlm_backend.runtime.forks import ProcessLock


class Storable(Protocol):
    """A value that can be kept: it knows its size, and can be moved. A tensor is one."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that it takes."""
        ...

    def to(self, device: Any, /) -> Any:
        """Return it on ``device``."""
        ...


R = TypeVar("R", bound=Storable)


@final
class RowCache(Generic[R]):
    """Least-recently-used rows within a budget of bytes; safe to use from several threads.

    Rows are stored and handed out as they are: whoever passes one on to be modified copies it.
    A row should own its memory, since a view would keep its whole batch alive.

    Args:
        budget: Bytes that the rows may take together; 0 stores nothing.
        max_rows: Rows that may be stored; ``None`` for any number.
        device: Where rows are kept; ``None`` for wherever they are when stored.

    Attributes:
        generation: Number of times that it has been cleared.

    Raises:
        OptionTypeError: (``TypeError``) If a bound is no integer.
        OptionError: (``ValueError``) If one is negative.
        DeviceError: (``ValueError``) If the device is not there.
    """

    def __init__(
        self,
        budget: int,
        max_rows: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.budget = byte_count("budget", budget)
        self.max_rows = optional(integer(0))("max_rows", max_rows)
        self._device: torch.device | None = optional(check_device)("device", device)
        self._lock = ProcessLock()
        self._rows: OrderedDict[Hashable, R] = OrderedDict()
        self._bytes = 0
        self.generation = 0
        self._num_hits = 0
        self._num_evicted = 0

    def get(self, key: Hashable) -> R | None:
        """Return the row of ``key`` and mark it as used, or ``None``."""
        if not self._rows:
            return None
        with self._lock.here:
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
                self._num_hits += 1
            return row

    def takes(self, num_bytes: int) -> bool:
        """Return whether a row of so many bytes would be stored."""
        return num_bytes <= self.budget and self.max_rows != 0

    def put(self, key: Hashable, row: R, generation: int | None = None) -> None:
        """Store ``row``, dropping the least recently used rows beyond budget and number.

        A row larger than the budget is not stored, nor one that was computed in another
        ``generation`` than the present one: before a ``clear()``.
        """
        self.put_all([(key, row)], generation)

    def put_all(self, pairs: Iterable[tuple[Hashable, R]], generation: int | None = None) -> None:
        """Store a row for each of many keys, one after another, as ``put`` does."""
        kept = [(key, row, size) for key, row in pairs if self.takes(size := row.nbytes)]
        if self._device is not None:
            kept = [(key, row.to(self._device), size) for key, row, size in kept]
        most = math.inf if self.max_rows is None else self.max_rows
        with self._lock.here:
            if generation is not None and generation != self.generation:
                return
            for key, row, size in kept:
                old = self._rows.pop(key, None)
                if old is not None:
                    self._bytes -= old.nbytes
                self._rows[key] = row
                self._bytes += size
                while self._bytes > self.budget or len(self._rows) > most:
                    _, dropped = self._rows.popitem(last=False)
                    self._bytes -= dropped.nbytes
                    self._num_evicted += 1

    def clear(self) -> None:
        """Forget every row, and refuse those that are being computed now."""
        with self._lock.here:
            self._rows.clear()
            self._bytes = 0
            self.generation += 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows stored now."""
        return self._bytes

    @property
    def num_hits(self) -> int:
        """How often ``get`` has found its row."""
        return self._num_hits

    @property
    def num_evicted(self) -> int:
        """Rows dropped to stay within the budget."""
        return self._num_evicted

    def __len__(self) -> int:
        return len(self._rows)
