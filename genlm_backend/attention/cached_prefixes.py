"""CachedPrefixes: the cached tokens of the rows of a pass, as nodes of a prefix tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np

from genlm_backend.prefix.nodes import Nodes
from genlm_backend.prefix.slot_allocator import PADDING_SLOT
from genlm_backend.runtime.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray


@final
@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefixes:
    """The cached tokens of ``B`` rows, each a path from a node of a prefix tree up to its root."""

    # The arrays of the tree, by node; they are valid until the tree changes.
    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    slot: NDArray[np.int32]
    nodes: NDArray[np.int64]  # [B] int64

    @classmethod
    def of(cls, tree: Nodes, nodes: NDArray[np.int32]) -> Self:
        return cls(tree.parent, tree.depth, tree.slot, nodes.astype(np.int64))

    @classmethod
    def none(cls, num_rows: int) -> Self:
        root = np.zeros(1, np.int32)
        return cls(root, root, root, np.zeros(num_rows, np.int64))

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Number of cached tokens of each row: int64 ``[B]``."""
        return self.depth[self.nodes].astype(np.int64)

    def columns(self, num_columns: int) -> NDArray[np.int64]:
        """Return the slots of every row, padded on the left: int64 ``[B, num_columns]``."""
        slots = np.full((len(self.nodes), num_columns), PADDING_SLOT, np.int64)
        _write_columns(self.parent, self.depth, self.slot, self.nodes, slots)
        return slots

    def write_last(self, slots: NDArray[np.int64]) -> None:
        """Write the slots of the last tokens of every row, the last one first."""
        _write_last(self.parent, self.depth, self.slot, self.nodes, slots)


@compiled
def _write_columns(parent: Any, depth: Any, slot: Any, nodes: Any, slots: Any) -> None:
    for row in range(len(nodes)):
        node, column = nodes[row], slots.shape[1]
        while depth[node] > 0:
            column -= 1
            slots[row, column] = slot[node]
            node = parent[node]


@compiled
def _write_last(parent: Any, depth: Any, slot: Any, nodes: Any, slots: Any) -> None:
    for row in range(len(nodes)):
        node = nodes[row]
        for column in range(min(slots.shape[1], depth[node])):
            slots[row, column] = slot[node]
            node = parent[node]
