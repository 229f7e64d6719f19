"""Sequences: tracks the tokens in llama.cpp's sequences, and chooses one for each row.

llama.cpp keeps a token's keys and values in a *cell*, which any number of *sequences* may share; a
row attends to the cells of one sequence. A slot of the prefix tree at a position identifies the
whole prefix up to it, until the tree reuses the slot. The least recently used sequences are evicted
first, independently of the tree: tokens in the tree that no sequence holds are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.backends.llama_cpp.llama_context import LlamaContext
from genlm_backend.prefix.nodes import Ints, Nodes

_PINNED: Final = np.iinfo(np.int64).max


@final
class Sequences:
    """Records the slot of each token in llama.cpp's sequences, by position."""

    def __init__(
        self,
        context: LlamaContext,
        length: int,
        num_slots: int,
        compute: Callable[[int, int, Ints], None],
    ) -> None:
        self._context, self._compute = context, compute  # compute(sequence, start, token_ids)
        count = context.size.sequences.num_contexts
        self._slots = np.zeros((count, length), np.int32)
        self._sizes, self._used = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._position = np.zeros(num_slots + 1, np.int32)  # of each slot's token
        self._now = 0

    def clear(self) -> None:
        for sequence in range(len(self._sizes)):
            self.cut(sequence, 0)

    def cut(self, sequence: int, size: int) -> None:
        """Remove the tokens of a sequence after its first ``size``."""
        self._context.cut(sequence, size)
        self._sizes[sequence] = size
        if not size:
            self._used[sequence] = 0

    def undo(self, rows: Ints) -> None:
        """Remove from the sequences ``rows`` the tokens that ``hold`` has not recorded."""
        for sequence in rows.tolist():
            self._context.cut(sequence, int(self._sizes[sequence]))

    def hold(self, rows: Ints, slots: Sequence[Ints]) -> None:
        """Record the ``slots`` of the tokens that a pass has appended to the sequences ``rows``."""
        for sequence, new in zip(rows.tolist(), slots, strict=True):
            start, stop = int(self._sizes[sequence]), int(self._sizes[sequence]) + len(new)
            self._slots[sequence, start:stop], self._sizes[sequence] = new, stop
            self._position[new] = np.arange(start, stop)

    def release(self, slots: Ints) -> None:
        """Cut sequences before their first token in any of these slots, which the tree reuses."""
        positions = self._position[slots]
        is_there = (self._slots[:, positions] == slots) & (positions < self._sizes[:, None])
        sizes = np.where(is_there, positions, np.iinfo(np.int32).max).min(axis=1)
        for sequence in np.flatnonzero(sizes < self._sizes).tolist():
            self.cut(sequence, int(sizes[sequence]))

    def drop_idle(self) -> bool:
        """Empty the least recently used sequence outside the pass; return whether there was one."""
        used = np.where(self._sizes > 0, self._used, _PINNED)
        sequence = int(used.argmin())
        if used[sequence] >= self._now:
            return False
        self.cut(sequence, 0)
        return True

    # ---------------------------------------------------------------- rows

    def place(self, nodes: Nodes, ends: Ints) -> NDArray[np.int64]:
        """Return for each row a sequence that holds just the path to the row's node in ``ends``."""
        self._now += 2
        rows, sizes, slots = np.full(len(ends), -1), nodes.depth[ends], nodes.slot[ends]
        for row, (size, slot) in enumerate(zip(sizes.tolist(), slots.tolist(), strict=True)):
            holders = self._holders(slot, size)
            free = holders[(self._sizes[holders] == size) & (self._used[holders] < self._now)]
            if len(free):
                rows[row], self._used[free[0]] = free[0], self._now
            else:  # the sequence to copy should be evicted last
                self._used[holders[:1]] = np.maximum(self._used[holders[:1]], self._now - 1)
        for row in np.flatnonzero(rows < 0).tolist():
            sequence = rows[row] = int(self._used.argmin())
            assert self._used[sequence] < self._now
            self.cut(sequence, 0)
            self._used[sequence] = self._now
            size = int(sizes[row])
            holders = self._holders(int(slots[row]), size)
            if len(holders):
                self._copy(holders, sequence, size)
            elif size:
                self._restore(sequence, nodes, nodes.path(int(ends[row])))
        return rows

    def pin(self, nodes: Nodes, end: int) -> None:
        """Keep the tokens of the path to a node in a sequence that no row extends."""
        holders = self._holders(int(nodes.slot[end]), int(nodes.depth[end]))
        if not (self._used[holders] == _PINNED).any():
            self._used[self.place(nodes, np.array([end]))] = _PINNED

    def _copy(self, sources: Ints, sequence: int, size: int) -> None:
        """Copy the first ``size`` tokens of the first of ``sources`` to an empty ``sequence``."""
        self._context.copy(int(sources[0]), sequence, size)
        self._slots[sequence, :size] = self._slots[sources[0], :size]
        self._sizes[sequence] = size

    def _restore(self, sequence: int, nodes: Nodes, path: Ints) -> None:
        """Fill an empty sequence with a path: copy what some sequence holds, compute the rest."""
        slots, start = nodes.slot[path], 0
        if not self._context.model.has_states:  # else a copied part has no state to continue
            is_there = self._slots[:, : len(path)] == slots
            is_there &= np.arange(len(path)) < self._sizes[:, None]
            for size in (np.flatnonzero(is_there.any(axis=0)) + 1)[::-1].tolist():
                holders = self._holders(int(slots[size - 1]), size)
                if len(holders):
                    self._copy(holders, sequence, size)
                    start = size
                    break
        self._compute(sequence, start, nodes.token[path[start:]])
        self.hold(np.array([sequence]), [slots[start:]])

    def _holders(self, slot: int, size: int) -> NDArray[np.intp]:
        """Return the sequences whose first ``size`` tokens end with ``slot``."""
        if not size:
            return np.empty(0, np.intp)
        holders = np.flatnonzero((self._slots[:, size - 1] == slot) & (self._sizes >= size))
        # llama.cpp reuses the cell of a token before the sliding window once only one sequence
        # holds it. A sequence that has lost such tokens can be extended only at its end.
        window = self._context.model.window
        if window and len(holders):
            firsts = np.array([self._context.first_position(i) for i in holders.tolist()])
            holders = holders[(firsts >= 0) & (firsts <= max(0, size - window + 1))]  # -1: empty
        return holders
