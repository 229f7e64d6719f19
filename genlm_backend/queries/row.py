"""Rows: the next-token log-probabilities of a context, their computation, and their cache."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, Generic, TypeAlias, TypeVar, final

import numpy as np
import torch

from genlm_backend.checks import byte_count, integer, optional
from genlm_backend.checks import device as check_device
from genlm_backend.runtime.forks import ProcessLock
from genlm_backend.runtime.spare_memory import SpareMemory


@final
class Row:
    """Next-token log-probabilities of a context.

    Args:
        logprobs: Natural logarithms of the probabilities: float32 ``[vocab]``.
        logsumexp: The logsumexp of the model's logits; a logit is the log-probability plus it.
            ``None`` if the logits are not known.

    Attributes:
        logsumexp: The logsumexp of the logits, or ``None``.
        table: The table, ``[n, vocab]``, that ``of_table`` made the row from; ``None`` otherwise.
        index: The row's index in its table; 0 without a table.
    """

    __slots__ = ("_logprobs", "index", "logsumexp", "table")

    def __init__(self, logprobs: torch.Tensor, logsumexp: float | None = None) -> None:
        self._logprobs: torch.Tensor | None = logprobs
        self.logsumexp, self.index = logsumexp, 0
        self.table: torch.Tensor | None = None

    @classmethod
    def of_table(cls, table: torch.Tensor, logsumexps: Iterable[float | None]) -> list[Row]:
        """Return the rows of a table, float32 ``[n, vocab]``, as views of it."""
        # A view takes 1 us to make. Off the CPU, it is made on use: most callers use the table.
        views = table.unbind() if table.is_cpu else (None,) * len(table)
        rows: list[Row] = []
        for index, (view, logsumexp) in enumerate(zip(views, logsumexps, strict=True)):
            row = object.__new__(cls)
            row._logprobs, row.logsumexp, row.table, row.index = view, logsumexp, table, index
            rows.append(row)
        return rows

    @property
    def logprobs(self) -> torch.Tensor:
        """Log-probabilities: float32 ``[vocab]``, maybe a view of a table; not to be modified."""
        if self._logprobs is None and self.table is not None:
            self._logprobs = self.table[self.index]
        # A custom evaluator may have passed any object; ``is_of`` checks it.
        return self._logprobs  # pyright: ignore[reportReturnType]

    def __repr__(self) -> str:
        return f"Row(logprobs={self.logprobs!r}, logsumexp={self.logsumexp!r})"

    @property
    def nbytes(self) -> int:
        """Number of bytes of the log-probabilities."""
        return self.logprobs.nbytes

    @property
    def is_nan(self) -> bool:
        """Whether a log-probability is NaN, by the logsumexp alone if that is known."""
        if self.logsumexp is None:
            return bool(self.logprobs.isnan().any())
        return math.isnan(self.logsumexp)

    def is_of(self, vocab_size: int) -> bool:
        """Return whether ``logprobs`` is a float32 tensor ``[vocab_size]`` without gradient."""
        row = self.logprobs
        is_row = isinstance(row, torch.Tensor) and row.dtype is torch.float32
        return is_row and row.shape == (vocab_size,) and not row.requires_grad

    def to(self, device: torch.device) -> Row:
        """Return the row on ``device``, uncopied if it is there already."""
        moved = self.logprobs.to(device)
        return self if moved is self.logprobs else Row(moved, self.logsumexp)

    def copy_logprobs(self, device: torch.device) -> torch.Tensor:
        """Return a copy of the log-probabilities on ``device``, for a caller to modify."""
        row = self.logprobs
        if not row.is_cpu or device.type != "cpu":
            return row.to(device, copy=True)
        return own_copy(row.numpy())

    def own_logits(self, device: torch.device) -> torch.Tensor:
        """Return a copy of the logits on ``device``; of log-probabilities if logits are unknown."""
        logits = self.copy_logprobs(device)
        return logits if self.logsumexp is None else logits.add_(self.logsumexp)

    def __reduce__(self) -> tuple[type[Row], tuple[torch.Tensor, float | None]]:
        return Row, (self.logprobs.clone(), self.logsumexp)  # a view would pickle its whole table

    def without(self, token_ids: torch.Tensor) -> Row:
        """Return the row renormalised without ``token_ids``, int64 ``[n]``, which get ``-inf``."""
        return rows_without([self], token_ids)[0]


def alone(rows: Sequence[Row]) -> list[Row]:
    """Return copies of rows; each copy owns its memory, so that it keeps no table alive."""
    own: list[torch.Tensor] = []
    for _, table in _tables(rows):
        own += map(own_copy, table.numpy()) if table.is_cpu else map(torch.clone, table)
    return [Row(logprobs, row.logsumexp) for logprobs, row in zip(own, rows, strict=True)]


def are_rows_of(rows: Sequence[Row], vocab_size: int) -> bool:
    """Return whether ``Row.is_of`` holds for all rows, by one row per table if all have tables."""
    tables = {id(row.table): row.table for row in rows}
    if None not in tables.values():  # the usual case: one row of each table is checked
        tensors = [table[0] for table in tables.values() if table is not None]
    else:
        tensors = [row.logprobs for row in rows]
    return (
        set(map(type, tensors)) <= {torch.Tensor}
        and {tensor.dtype for tensor in tensors} <= {torch.float32}
        and {tensor.shape for tensor in tensors} <= {(vocab_size,)}
        and not any(map(_REQUIRES_GRAD, tensors))
    )


_REQUIRES_GRAD: Final = attrgetter("requires_grad")


@torch.no_grad()
def rows_without(rows: Sequence[Row], token_ids: torch.Tensor) -> list[Row]:
    """Return rows renormalised without ``token_ids``, int64 ``[n]``, which get ``-inf``."""
    found = list(rows)
    for start, table in _tables(rows):
        ids = token_ids.to(table.device)
        theirs = table.index_select(1, ids)
        shares = theirs.exp().sum(-1).tolist()
        for index, is_done in enumerate((theirs == -torch.inf).all(-1).tolist()):
            # Not in place, since an evaluator may have returned one row twice.
            if not is_done:
                found[start + index] = _restricted(rows[start + index], ids, shares[index])
    return found


def _restricted(row: Row, ids: torch.Tensor, excluded: float) -> Row:
    logprobs = row.copy_logprobs(ids.device).index_fill_(0, ids, -torch.inf)
    # Log of the mass left. If little is left, summing it is more precise than 1 - excluded.
    left = math.log1p(-excluded) if excluded < 0.5 else float(logprobs.logsumexp(-1))
    if left and left > -math.inf:  # 0: no mass was excluded; -inf: none is left
        logprobs.sub_(left).clamp_(max=0)  # rounding may give numbers above 0
    return Row(logprobs, None if row.logsumexp is None else row.logsumexp + left)


def _tables(rows: Sequence[Row]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each run of one table's consecutive rows: its start in ``rows``, and a view of it."""
    start = 0
    while start < len(rows):
        stop, table, index = start + 1, rows[start].table, rows[start].index
        if table is None:
            yield start, rows[start].logprobs[None]
        else:
            while stop < len(rows):
                row = rows[stop]
                if row.table is not table or row.index != index + stop - start:
                    break
                stop += 1
            yield start, table[index : index + stop - start]
        start = stop


def stacked(rows: Sequence[Row]) -> torch.Tensor:
    """Return rows' log-probabilities, ``[n, vocab]``; a view if they are consecutive in a table."""
    parts = [table for _, table in _tables(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rows_on(rows: Sequence[Row], device: torch.device) -> list[Row]:
    """Return rows moved to ``device``, or as they are if all are on it already."""
    found = list(rows)
    memory = [row.logprobs if row.table is None else row.table for row in rows]
    if all(
        tensor.device == device
        for tensor in dict(zip(map(id, memory), memory, strict=True)).values()
    ):
        return found
    for start, table in _tables(rows):
        stop = start + len(table)
        logsumexps = [row.logsumexp for row in rows[start:stop]]
        found[start:stop] = _rows_moved(table, logsumexps, device)
    return found


def table_of(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    """Return a copy on ``device`` of the log-probabilities of one or more rows: ``[n, vocab]``."""
    parts = [part for _, part in _tables(rows)]
    if device.type != "cpu":
        if len(parts) == 1:
            return parts[0].to(device, copy=True)
        return torch.cat([part.to(device) for part in parts])
    table = spare_memory.take_array((len(rows), len(rows[0].logprobs)), np.float32)
    # Pinned rows come from a GPU. So no model occupies the CPU's threads, and torch may use them
    # all: a copy of 33 MB takes 0.8 ms with 16 threads, and 4 ms with one.
    is_for_threads = torch.cuda.is_initialized() and all(
        part.nbytes >= _MANY_BYTES and part.is_pinned() for part in parts
    )
    own, start = torch.from_numpy(table), 0
    for part in parts:
        stop = start + len(part)
        if is_for_threads:
            own[start:stop] = part
        else:
            put_rows(rows[start:stop], table[start:stop])
        start = stop
    return own


_Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

spare_memory: Final = SpareMemory(128 << 20)
"""Reused memory for rows, and for intermediate arrays of readouts."""

_SMALL: Final = 1 << 14
_MANY_BYTES: Final = 1 << 21

# A memoryview copies by one memcpy. torch would wake a team of threads, which is slower. torch and
# NumPy also release the GIL for a copy; another thread that runs Python may then keep it for 5 ms.
# A copy of 49,152 numbers takes 20 us on one thread and 46 us by clone; 128,256 numbers take 45 and
# 128 us. A copy of 1,000 takes 4 us, nearly all to get spare memory, and 1 us by clone. So small
# rows use no spare memory: the allocator reuses freed memory of their size at once.


def own_copy(row: _Numbers) -> torch.Tensor:
    if row.nbytes <= _SMALL:
        return torch.frombuffer(bytearray(row.data), dtype=torch.float32)
    own = spare_memory.take_array(row.shape, np.float32)
    own.data.cast("B")[:] = np.ascontiguousarray(row).data.cast("B")
    return torch.from_numpy(own)


def own_table(numbers: _Numbers) -> torch.Tensor:
    """Return a copy of a table of rows as a tensor: float32 ``[n, vocab]``."""
    table = spare_memory.take_array(numbers.shape, np.float32)
    _write(numbers, table)
    return torch.from_numpy(table)


def put_rows(rows: Sequence[Row], table: _Numbers) -> None:
    """Write the log-probabilities of rows on any device into a contiguous table ``[n, vocab]``."""
    for start, part in _tables(rows):
        _write(part.cpu().contiguous().numpy(), table[start : start + len(part)])


def _write(numbers: _Numbers, table: _Numbers) -> None:
    """Copy ``numbers`` into ``table``, row by row; between rows, other threads may take the GIL."""
    for own, row in zip(table, numbers, strict=True):
        own.data.cast("B")[:] = row.data.cast("B")


def rows_of_logits(
    logits: torch.Tensor,
    device: torch.device | None = None,
    undefined_ids: Sequence[int] = (),
    *,
    in_place: bool = False,
) -> list[Row]:
    """Return one row for each vector of logits ``[n, vocab]`` of any dtype.

    Rows are computed in float32 on the logits' device. The logits of ``undefined_ids`` are ignored,
    even if infinite or NaN. Except on CUDA, a row's probabilities sum to one, up to the rounding of
    each. torch's ``log_softmax`` does not ensure that: 49,152 probabilities may sum to 1 ± 2e-5.

    The rows are views of shared tables; each row keeps its whole table alive. ``alone`` copies.

    Args:
        logits: Vectors of logits.
        device: Device of the returned rows; ``None`` for the logits' device.
        undefined_ids: Ids that no token has, whose logits are ignored.
        in_place: Whether the logits may be overwritten. Off CUDA, float32 logits then need no
            second table, whose allocation takes as long as the computation.
    """
    table, of_rows = log_softmax(logits, undefined_ids, in_place)
    logsumexps = of_rows.tolist()
    if device is None:
        return Row.of_table(table, logsumexps)
    return _rows_moved(table, logsumexps, device)


MAX_PINNED: Final = 1 << 28
"""Most bytes of one block of pinned memory, through which rows move between CPU and CUDA."""


def _rows_moved(
    table: torch.Tensor, logsumexps: Sequence[float | None], device: torch.device
) -> list[Row]:
    """Return the rows of a table on a device, moved in tables of up to ``MAX_PINNED`` bytes."""
    if table.device == device:
        return Row.of_table(table, logsumexps)
    row_bytes, rows = table.shape[1] * table.element_size(), list[Row]()
    size = max(1, MAX_PINNED // row_bytes)
    for start in range(0, len(table), size):
        part = moved(table[start : start + size], device)
        rows += Row.of_table(part, logsumexps[start : start + size])
    return rows


def moved(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a table on ``device``; at most ``MAX_PINNED`` bytes go to CUDA asynchronously."""
    # On an H100, 33 MB take 0.8 ms through pinned memory, which torch caches, and 5 ms otherwise.
    if table.nbytes > MAX_PINNED or {table.device.type, device.type} != {"cpu", "cuda"}:
        return table.to(device)
    if table.is_cpu:
        return table.pin_memory().to(device, non_blocking=True)
    pinned = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return pinned.copy_(table)


def scores_of_logits(
    logits: torch.Tensor,
    places: Sequence[int],
    targets: Sequence[int],
    undefined_ids: Sequence[int] = (),
) -> torch.Tensor:
    """Return log-probabilities of single tokens from vectors of logits ``[n, vocab]``: float32.

    They equal the numbers of ``rows_of_logits`` bit for bit; no ``Row`` is made.

    Args:
        logits: Vectors of logits, of any dtype.
        places: Index of the vector that each answer is read from.
        targets: The token of each answer.
        undefined_ids: Ids that no token has, whose logits are ignored.
    """
    rows, columns = (
        torch.tensor(ids, dtype=torch.int64, device=logits.device) for ids in (places, targets)
    )
    return log_softmax(logits, undefined_ids)[0][rows, columns]


def log_softmax(
    logits: torch.Tensor, undefined_ids: Sequence[int], in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities, float32 ``[n, vocab]``, and the logits' logsumexps, ``[n]``.

    See ``rows_of_logits``.
    """
    is_own, logits = in_place, logits.detach()
    if undefined_ids:
        logits, is_own = fill_undefined(logits, undefined_ids, in_place), True
    if logits.is_cuda:  # one fused kernel: few launches
        table = torch.log_softmax(logits, -1, dtype=torch.float32)
        return table, logits.amax(-1) - table.amax(-1)
    given = logits.float()
    table = given if is_own or given is not logits else torch.empty_like(given)
    # A few rows at a time stay in the CPU's cache, and share one buffer for their exponentials: a
    # fresh table of 256 rows of 49,152 would cost 15 ms of page faults.
    few, logsumexps = max(1, _FEW_NUMBERS // max(1, given.shape[1])), list[torch.Tensor]()
    exponentials = torch.empty_like(given[:few])
    for own, found in zip(given.split(few), table.split(few), strict=True):
        largest = own.amax(-1, keepdim=True)
        torch.sub(own, largest, out=found)  # own - (largest + sums) could round sums away
        sums = torch.exp(found, out=exponentials[: len(found)]).sum(-1, keepdim=True).log_()
        found.sub_(sums)
        logsumexps.append((largest + sums)[:, 0])
    return table, torch.cat(logsumexps)


_FEW_NUMBERS: Final = 1 << 19


def fill_undefined(
    logits: torch.Tensor, undefined_ids: Sequence[int], in_place: bool = False
) -> torch.Tensor:
    """Return logits ``[n, vocab]`` with ``-inf`` for undefined ids; unchanged if there are none."""
    if not undefined_ids:
        return logits
    ids = _ids_on(logits.device, tuple(undefined_ids))
    return (logits.index_fill_ if in_place else logits.index_fill)(1, ids, -torch.inf)


@functools.lru_cache(maxsize=32)
def _ids_on(device: torch.device, ids: tuple[int, ...]) -> torch.Tensor:
    """Return ids as a cached tensor, int64 ``[n]``: making it may take as long as making a row."""
    with torch.inference_mode(False):  # inference tensors fail in autograd
        return torch.tensor(ids, dtype=torch.int64, device=device)


R = TypeVar("R", bound=Any)


@final
class RowCache(Generic[R]):
    """An LRU cache of rows within a budget of bytes; any thread may call it."""

    def __init__(
        self, budget: int, max_rows: int | None = None, device: str | torch.device | None = None
    ) -> None:
        self.budget = byte_count("budget", budget)
        self.max_rows = optional(integer(0))("max_rows", max_rows)
        self._device: torch.device | None = optional(check_device)("device", device)
        self._lock = ProcessLock()
        # Each stored row should own its memory: a view would keep its whole table alive.
        self._rows: OrderedDict[Hashable, R] = OrderedDict()
        self.num_bytes = self.num_clears = self.num_hits = self.num_evicted = 0

    def get(self, key: Hashable) -> R | None:
        """Return the row of ``key`` and mark it as used; ``None`` if there is none."""
        if not self._rows:
            return None
        with self._lock.here:
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
                self.num_hits += 1
            return row

    def takes(self, num_bytes: int) -> bool:
        return num_bytes <= self.budget and self.max_rows != 0

    def put(self, key: Hashable, row: R, num_clears: int | None = None) -> None:
        """Store ``row``, unless it is too large or ``clear`` ran since ``num_clears`` was read."""
        self.put_all([(key, row)], num_clears)

    def put_all(self, pairs: Iterable[tuple[Hashable, R]], num_clears: int | None = None) -> None:
        """Store pairs of key and row as ``put`` does, acquiring the lock once."""
        kept = [(key, row, size) for key, row in pairs if self.takes(size := row.nbytes)]
        if self._device is not None:
            kept = [(key, row.to(self._device), size) for key, row, size in kept]
        most = math.inf if self.max_rows is None else self.max_rows
        with self._lock.here:
            # Rows of queries that began before the latest ``clear()`` are not stored.
            if num_clears is not None and num_clears != self.num_clears:
                return
            for key, row, size in kept:
                old = self._rows.pop(key, None)
                if old is not None:
                    self.num_bytes -= old.nbytes
                self._rows[key] = row
                self.num_bytes += size
                while self.num_bytes > self.budget or len(self._rows) > most:
                    _, dropped = self._rows.popitem(last=False)
                    self.num_bytes -= dropped.nbytes
                    self.num_evicted += 1

    def clear(self) -> None:
        """Forget every row; ``put`` with an older ``num_clears`` then stores nothing."""
        with self._lock.here:
            self._rows.clear()
            self.num_bytes = 0
            self.num_clears += 1

    def __len__(self) -> int:
        return len(self._rows)
