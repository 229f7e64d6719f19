"""ParallelTokenCharacterTrie: prefix weights by a sparse matrix in torch, on a GPU or the CPU.

The reference is ``naive_trie_weights`` in tests/naive.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from genlm_backend.checks import device as check_device
from genlm_backend.checks import switch
from genlm_backend.trie.base import VocabularyTrie
from genlm_backend.trie.reachability import RADIX, build_reachability
from genlm_backend.trie.weights import Operation, Weights, is_tensor, to_numpy, torch_dtype

MAX_ELEMENTS = 1 << 26
"""About the most elements of one tensor: a larger batch is evaluated in parts, of a row or more."""


@final
class ParallelTokenCharacterTrie(VocabularyTrie):
    """A trie that sums and maximises with a sparse reachability matrix in torch.

    See ``VocabularyTrie`` for the vocabulary and the weights, and ``reachability.py`` for the
    matrix. This class is meant for a GPU; on a CPU, ``TokenCharacterTrie`` is faster. The results
    of both classes are equal up to rounding.

    Args:
        decode: The vocabulary.
        device: Device of the matrix: "cuda", "cuda:1", "mps", "cpu", …; by default "cuda" if
            available, else "cpu".
        as_tensor: Whether results are tensors on ``device`` instead of NumPy arrays. Weights on
            ``device`` then never leave it.

    Raises:
        DeviceError: If torch does not know ``device``, or this machine does not have it.
    """

    def __init__(
        self,
        decode: Iterable[Any],
        device: str | torch.device | None = None,
        *,
        as_tensor: bool = False,
    ) -> None:
        if device is None:
            device = "cuda" if cuda_is_available() else "cpu"
        self.device: torch.device = check_device("device", device)
        self.as_tensor = switch("as_tensor", as_tensor)
        self.has_sparse_product = self.device.type != "mps"
        super().__init__(decode)
        reachability = build_reachability(self.layout)

        def to_device(array: np.ndarray) -> Tensor:
            return _from_numpy(array).to(self.device)

        self._level_sizes = reachability.level_sizes
        self._shape = (self.layout.num_branches, sum(self._level_sizes))
        self._sorted_tokens = to_device(self.layout.sorted_tokens)
        self._node_sources = to_device(reachability.node_sources)
        self._row_starts = to_device(reachability.row_starts)
        self._columns = to_device(reachability.columns)
        lengths = np.diff(reachability.row_starts)
        self._rows = to_device(np.repeat(np.arange(len(lengths)), lengths))
        self._matrices: dict[torch.dtype, Tensor] = {}

    def evaluate_batch(self, operation: Operation, batch: Weights) -> Any:
        result = self._evaluate(operation, batch)
        return result if self.as_tensor else result.cpu().numpy()

    def evaluate_rows(self, operation: Operation, batch: list[Weights]) -> Sequence[Any]:
        tensors = [self._to_device(weights) for weights in batch]
        rows: list[Any] = [None] * len(batch)
        for dtype in {tensor.dtype for tensor in tensors}:  # rows of one precision at a time
            indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            result = self._evaluate(operation, [tensors[i] for i in indices])
            found = list(result) if self.as_tensor else list(result.cpu().numpy())
            for i, row in zip(indices, found, strict=True):
                rows[i] = row.clone() if isinstance(row, Tensor) else row.copy()
        return rows

    # ---------------------------------------------------------------- on the device

    @torch.no_grad()
    def _evaluate(self, operation: Operation, batch: Weights) -> Tensor:
        if len(batch) == 0:
            like = torch.empty(0) if isinstance(batch, list) else self._to_device(batch)
            return like.new_empty(0, self.num_nodes, device=self.device)
        if isinstance(batch, list):
            rows = [self._to_device(weights) for weights in batch]
            dtype = torch.float64 if any(r.dtype == torch.float64 for r in rows) else torch.float32
            batch = torch.stack([row.to(dtype) for row in rows])
        size = max(1, MAX_ELEMENTS // max(self.num_nodes, len(self._columns)))
        parts = [
            self._evaluate_part(operation, self._to_device(batch[i : i + size]))
            for i in range(0, len(batch), size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _to_device(self, weights: Weights) -> Tensor:
        tensor = weights if is_tensor(weights) else _from_numpy(to_numpy(weights))
        dtype = torch.float32 if self.device.type == "mps" else torch_dtype(tensor.dtype)
        return tensor.detach().to(device=self.device, dtype=dtype)

    def _evaluate_part(self, operation: Operation, weights: Tensor) -> Tensor:
        # A row of the table has the values of the tokens, of the blocks of every level, and of the
        # branches. Each part is written in place, since concatenating them would double the time.
        num_branches, num_columns = self._shape
        table = weights.new_empty(len(weights), num_columns + num_branches)
        columns = table[:, :num_columns]
        tokens = columns[:, : self._level_sizes[0]]
        torch.index_select(weights, 1, self._sorted_tokens, out=tokens)
        start, end = 0, self._level_sizes[0]
        reduce, kernel = {
            "sum": (torch.sum, self.sum_kernel),
            "max": (torch.amax, self.max_kernel),
            "log_sum": (torch.logsumexp, self._log_sum),
        }[operation]
        for size in self._level_sizes[1:]:  # the blocks of each level after the tokens
            level = columns[:, start : start + size * RADIX].unflatten(1, (size, RADIX))
            reduce(level, -1, out=columns[:, end : end + size])
            start, end = end, end + size
        table[:, num_columns:] = kernel(columns)
        return table.index_select(1, self._node_sources)

    def sum_kernel(self, columns: Tensor) -> Tensor:
        """Return the sum of each branch's columns: ``[batch, num_branches]``.

        Uses a sparse product; on MPS, which has no such product, ``index_add_``.
        """
        if not self._shape[0]:
            return columns[:, :0]
        if not self.has_sparse_product:
            source = columns.index_select(1, self._columns)
            return self._zeros(columns).index_add_(1, self._rows, source)
        # Contiguous, since the product reads the values of a column for the whole batch at once.
        return torch.sparse.mm(self._matrix(columns.dtype), columns.t().contiguous()).t()

    def max_kernel(self, columns: Tensor) -> Tensor:
        """Return the largest of each branch's columns, by a scatter: ``[batch, num_branches]``."""
        source = columns.index_select(1, self._columns)
        return self._zeros(columns).scatter_reduce_(
            1, self._rows.expand_as(source), source, "amax", include_self=False
        )

    def _log_sum(self, columns: Tensor) -> Tensor:
        largest = self.max_kernel(columns)
        # Do not shift a branch whose maximum is -inf, inf or NaN: exp and log preserve these.
        shift = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
        source = columns.index_select(1, self._columns) - shift.index_select(1, self._rows)
        total = self._zeros(columns).index_add_(1, self._rows, source.exp_())
        return total.log_().add_(shift)

    def _zeros(self, columns: Tensor) -> Tensor:
        return columns.new_zeros(len(columns), self._shape[0])

    def _matrix(self, dtype: torch.dtype) -> Tensor:
        matrix = self._matrices.get(dtype)
        if matrix is None:
            ones = torch.ones(len(self._columns), dtype=dtype, device=self.device)
            with warnings.catch_warnings():  # about the beta CSR layout and unchecked invariants
                warnings.filterwarnings("ignore", "Sparse (CSR|invariant)", UserWarning)
                matrix = torch.sparse_csr_tensor(
                    self._row_starts.int(),
                    self._columns.int(),
                    ones,
                    self._shape,
                    check_invariants=True,
                )
            self._matrices[dtype] = matrix
        return matrix


def cuda_is_available() -> bool:
    return torch.cuda.is_available()


def _from_numpy(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.require(array, None, ["C", "A", "W"]))
