"""TokenCharacterTrie: prefix weights by a compiled bottom-up sweep on the CPU.

The reference is ``naive_trie_weights`` in tests/naive.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.checks import byte_count, integer, optional
from genlm_backend.runtime.spare_memory import SpareMemory
from genlm_backend.runtime.together import in_threads
from genlm_backend.trie.base import VocabularyTrie
from genlm_backend.trie.reachability import SWEEPS
from genlm_backend.trie.weights import Operation, Weights, to_numpy

Values = NDArray[np.floating]

DEFAULT_SPARE_BYTES = 256 << 20
"""Most bytes of freed result buffers that a trie keeps for reuse by default."""

NODES_PER_THREAD = 1_000_000
"""Fewest result elements per thread: below twice this number, a second thread costs more time than
it saves."""


@final
class TokenCharacterTrie(VocabularyTrie):
    """A trie that sums and maximises on the CPU, in one compiled call per row of weights.

    See ``VocabularyTrie`` for the vocabulary and the weights. Results are NumPy arrays. Sums
    accumulate in float64 from the leaves up, even for float32 results, so that small masses keep
    their digits when added to large ones. A row's results do not depend on the values of the
    batch's other rows. Several threads share a large batch, with the GIL released.

    Args:
        decode: The vocabulary.
        num_threads: Number of threads for a batch, at most; by default the number of processors
            that this process may use.
        spare_bytes: Bytes of freed result buffers to keep for reuse, at most; 0 keeps none.
            ``release()`` frees them.

    Raises:
        OptionTypeError: (``TypeError``) If ``num_threads`` or ``spare_bytes`` is no integer.
        OptionError: (``ValueError``) If ``num_threads`` or ``spare_bytes`` is out of its bounds.
        VocabularyError: (``ValueError``) See ``VocabularyTrie``.
        VocabularyTypeError: (``TypeError``) See ``VocabularyTrie``.
    """

    def __init__(
        self,
        decode: Iterable[Any],
        *,
        num_threads: int | None = None,
        spare_bytes: int = DEFAULT_SPARE_BYTES,
    ) -> None:
        num_threads = optional(integer(1))("num_threads", num_threads)
        spare_bytes = byte_count("spare_bytes", spare_bytes)
        super().__init__(decode)
        self.num_threads = num_threads or _num_processors()
        self._spare = SpareMemory(spare_bytes)

    def evaluate_batch(self, operation: Operation, batch: Weights) -> NDArray[np.floating]:
        rows = [*map(to_numpy, batch)] if isinstance(batch, list) else to_numpy(batch)
        dtypes = {row.dtype for row in rows} if isinstance(rows, list) else {rows.dtype}
        dtype = np.result_type(np.float32, *dtypes)
        out = self._spare.take_array((len(rows), self.num_nodes), dtype.type)
        self._sweep(operation, [row.astype(dtype, copy=False) for row in rows], out)
        return out

    def evaluate_rows(self, operation: Operation, batch: list[Weights]) -> Sequence[Values]:
        rows = [*map(to_numpy, batch)]
        out = [self._spare.take_array((self.num_nodes,), row.dtype.type) for row in rows]
        self._sweep(operation, rows, out)
        return out

    def release(self) -> None:
        self._spare.clear()

    def _sweep(self, operation: Operation, rows: Any, out: Any) -> None:
        sweep, arrays = SWEEPS[operation], self.layout.sweep_arrays

        def scratch(dtype: np.dtype) -> tuple[Values, Values]:
            # A maximum does not round, so the input's precision is enough.
            wide = dtype if operation == "max" else np.float64
            values = np.empty(self.layout.num_tokens + self.layout.num_branches, dtype)
            return values, np.empty(self.layout.num_branches + 1, wide)

        def sweep_part(part: slice) -> None:
            own = functools.cache(scratch)
            for row, result in zip(rows[part], out[part], strict=True):
                sweep(row, result, *own(row.dtype), *arrays)

        num_threads = len(rows) * self.num_nodes // NODES_PER_THREAD
        in_threads(sweep_part, len(rows), max(1, min(self.num_threads, len(rows), num_threads)))


def _num_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
