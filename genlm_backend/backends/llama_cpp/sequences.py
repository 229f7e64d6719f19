"""Sequences: which tokens llama.cpp's sequences hold, and in which one a row goes on.

llama.cpp keeps the keys and values of a token in a *cell*, which any number of *sequences* may
share; a row attends to the cells of one sequence. Here a cell is known by the slot that a prefix
tree has given its token. Every pass reads all cells up to the last one that is in use, in every
layer and for every row, and only masks those of other sequences. So what nobody has asked for a
while is *parked*: saved as bytes, out of every pass's way, and put back when it is needed.

Decides only, and knows no llama.cpp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import CacheError


class Cut(NamedTuple):
    """A sequence that loses tokens, parked ones too."""

    sequence: int
    start: int
    stop: int = -1


class Copy(NamedTuple):
    """A sequence that is given tokens of another one."""

    source: int
    sequence: int
    start: int
    stop: int


class Chain(NamedTuple):
    """Tokens that the same sequences hold."""

    start: int
    stop: int
    sequences: list[int]


class Park(NamedTuple):
    """Tokens that are saved and leave their cells."""

    number: int
    chain: Chain


class Unpark(NamedTuple):
    """Tokens that are put into cells again."""

    number: int
    start: int
    stops: dict[int, int]


class Discard(NamedTuple):
    """Tokens that were saved and that nobody holds any more."""

    number: int


class Compact(NamedTuple):
    """All cells that are in use, to be saved and put one after another."""

    chains: list[Chain]


Step: TypeAlias = Cut | Copy | Park | Unpark | Discard | Compact
"""Something that llama.cpp has to do."""


@final
class OutOfSequencesError(CacheError):
    """All sequences hold tokens that have to stay."""


@final
class Sequences:
    """The slots that each sequence holds, position by position.

    What a sequence holds is a path of the tree from its root, once it is settled, so that of two
    sequences with the same slot at a position the first ones are the same too. What is parked of a
    sequence are its last tokens.
    """

    def __init__(
        self,
        count: int,
        length: int,
        num_slots: int,
        spare: Callable[[NDArray[np.int32]], bool],
        window: int = 0,
    ) -> None:
        self._slots = np.zeros((count, length), np.int32)
        self.sizes, self.present = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._position = np.full(num_slots + 1, -1, np.int32)  # of each slot that is held
        self._spare, self._window = spare, window
        self._most_parked = min(MOST_PARKED, window) if window else MOST_PARKED
        self._num_rows = self._num_ticked = self._num_read = 0
        self._used = np.zeros(count, np.int64)  # the number of rows by then
        self.clear()

    def clear(self) -> None:
        """Have all sequences hold nothing."""
        self.sizes[:] = self.present[:] = 0
        self._position[:] = -1
        self.num_held = self.num_cells = self._peak = self._waste = 0
        self._unsettled: dict[int, int] = {}  # sequence -> position of what may be there twice
        self._parked: dict[int, list[_Parked]] = {}  # sequence -> the first ones last
        self._numbers = itertools.count()

    # ---------------------------------------------------------------- rows

    def place(
        self, last: NDArray[Any], sizes: NDArray[Any]
    ) -> tuple[NDArray[np.int64], list[Step]]:
        """Choose the sequences in which rows go on, and make them hold what the rows have."""
        self._num_rows += len(sizes)
        rows, steps = np.full(len(sizes), -1, np.int64), list[Step]()
        taken = np.zeros(len(self.sizes), np.bool_)
        holders = [self._holders(*one) for one in zip(last.tolist(), sizes.tolist(), strict=True)]
        for row, (size, holding) in enumerate(zip(sizes.tolist(), holders, strict=True)):
            if size:  # one that ends there goes on
                ends = holding[(self.sizes[holding] == size) & ~taken[holding]]
                if len(ends):
                    rows[row] = ends[0]
                    taken[ends[0]] = True
                    steps += self._unparked(int(ends[0]), size)
        for row in np.flatnonzero(rows < 0).tolist():
            size, slot = int(sizes[row]), int(last[row])
            sequence = self._vacant(taken, steps, slot, size)
            if size and self.sizes[sequence] != size:
                source = int(self._holders(slot, size)[0])
                steps += self._unparked(source, size)
                self._slots[sequence, :size] = self._slots[source, :size]
                self.sizes[sequence] = self.present[sequence] = size
                steps.append(Copy(source, sequence, 0, size))
                if self._unsettled.get(source, size) < size:
                    self._unsettled[sequence] = self._unsettled[source]
            elif size:
                steps += self._unparked(sequence, size)
            rows[row], taken[sequence] = sequence, True
        self._used[rows] = self._num_rows
        return rows, steps

    def _holders(self, slot: int, size: int) -> NDArray[np.intp]:
        """Return the sequences that hold a slot at the end of their first ``size`` tokens."""
        if not size:
            return np.empty(0, np.intp)
        found = np.flatnonzero((self._slots[:, size - 1] == slot) & (self.sizes >= size))
        if not len(found):
            raise CacheError(f"no sequence holds slot {slot} at position {size - 1}")
        return found

    def _vacant(self, taken: NDArray[np.bool_], steps: list[Step], slot: int, size: int) -> int:
        """Return a sequence that nobody has taken, and that holds what a row has, or nothing.

        In place of others go first those of which another one holds all, then the least recently
        used that may.
        """
        free = np.flatnonzero((self.sizes == 0) & ~taken)
        if len(free):
            return int(free[0])
        order = np.argsort(self._used, kind="stable")
        order = order[~taken[order]]
        for sequence in order[self._are_copies(order)].tolist()[:1]:
            steps += self._cut([Cut(sequence, 0)])
            return sequence
        for sequence in order.tolist():
            own = size and self._slots[sequence, size - 1] == slot and self.sizes[sequence] >= size
            start = max(size if own else 0, self._num_shared(sequence))
            if self._spare(self._slots[sequence, start : self.sizes[sequence]].copy()):
                steps += self._cut([Cut(sequence, size if own else 0)])
                return sequence
        raise OutOfSequencesError(
            f"all {len(self.sizes)} sequences of llama.cpp hold contexts of this batch or pinned "
            "ones"
        )

    def _are_copies(self, sequences: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return of sequences whether another one holds all that they do."""
        ends = self.sizes[sequences] - 1
        at = self._slots[:, ends] == self._slots[sequences, ends]
        return np.count_nonzero(at & (self.sizes[:, None] > ends), axis=0) > 1

    def _num_shared(self, sequence: int) -> int:
        """Return how many of a sequence's first tokens another one holds too."""
        low, high = 0, int(self.sizes[sequence])
        while low < high:
            size = (low + high + 1) // 2
            at = self._slots[:, size - 1] == self._slots[sequence, size - 1]
            if np.count_nonzero(at & (self.sizes >= size)) > 1:
                low = size
            else:
                high = size - 1
        return low

    # ---------------------------------------------------------------- slots

    def hold(self, sequence: int, slots: NDArray[Any]) -> None:
        """Note that a sequence holds tokens behind those that it has, in these slots."""
        start, stop = int(self.sizes[sequence]), int(self.sizes[sequence]) + len(slots)
        self._slots[sequence, start:stop] = slots
        self._unsettled[sequence] = min(start, self._unsettled.get(sequence, start))
        self.sizes[sequence] = self.present[sequence] = stop
        self._position[slots] = np.arange(start, stop)
        self.num_held += len(slots)
        self._count(len(slots))

    def release(self, slots: NDArray[Any]) -> list[Step]:
        """Have no sequence hold slots, nor what is behind them; return what has to be done."""
        slots = slots[self._position[slots] >= 0]
        if not len(slots):
            return []
        positions = self._position[slots]
        is_there = (self._slots[:, positions] == slots) & (positions < self.sizes[:, None])
        sizes = np.where(is_there, positions, np.iinfo(np.int32).max).min(axis=1)
        return self._cut(
            [Cut(i, int(sizes[i])) for i in np.flatnonzero(sizes < self.sizes).tolist()]
        )

    def held(self) -> NDArray[np.intp]:
        """Return the slots that are held."""
        return np.flatnonzero(self._position >= 0)

    def _cut(self, cuts: Sequence[Cut]) -> list[Step]:
        steps = list[Step](cuts)
        for sequence, size, _ in cuts:
            start = max(size, self._num_shared(sequence))
            self._forget(
                self._slots[sequence, start : self.sizes[sequence]],
                max(0, int(self.present[sequence]) - start),
            )
            self.sizes[sequence] = size
            self.present[sequence] = min(size, int(self.present[sequence]))
            if self._unsettled.get(sequence, -1) >= size:
                del self._unsettled[sequence]
            for parked in [one for one in self._parked.get(sequence, ()) if one.start >= size]:
                self._parked[sequence].remove(parked)
                parked.sequences.remove(sequence)
                if not parked.sequences:
                    steps.append(Discard(parked.number))
        return steps

    def _forget(self, slots: NDArray[Any], num_cells: int) -> None:
        """Note that no sequence holds slots, of which some are in cells."""
        self._position[slots] = -1
        self.num_held -= len(slots)
        self._count(-num_cells)

    def _count(self, num_more: int) -> None:
        """Note that so many cells more are in use."""
        self.num_cells += num_more
        self._peak = max(self._peak, self.num_cells)

    def settle(
        self, is_known: NDArray[np.bool_], path_to: Callable[[int], NDArray[Any]]
    ) -> list[Step]:
        """Have sequences hold the paths of the tree, where it has found tokens to be there twice.

        It is to be called once the tokens of a batch are linked. Of those that had been computed
        already, the slots are free again, and others follow the nodes that were there.
        """
        steps, again = list[Step](), list[NDArray[np.int32]]()
        for sequence, start in self._unsettled.items():
            own = self._slots[sequence, start : self.sizes[sequence]]
            known = np.flatnonzero(is_known[own])
            if not len(known) or known[-1] + 1 == len(known):
                continue  # the first ones are known, and maybe no others
            path = path_to(int(own[known[-1]]))
            others = np.flatnonzero(self._slots[sequence, : len(path)] != path)
            again.append(self._slots[sequence, others])
            for stretch in np.split(others, np.flatnonzero(np.diff(others) != 1) + 1):
                steps.append(Cut(sequence, int(stretch[0]), int(stretch[-1]) + 1))
                steps += self._copies(sequence, path, int(stretch[0]), int(stretch[-1]) + 1)
            self._slots[sequence, : len(path)] = path
        self._unsettled.clear()
        for slots in again:
            is_there = self._slots[:, self._position[slots]] == slots
            is_there &= self._position[slots] < self.sizes[:, None]
            gone = slots[~is_there.any(axis=0)]
            self._forget(gone, len(gone))
        return steps

    def _copies(self, sequence: int, path: NDArray[Any], start: int, stop: int) -> Iterator[Step]:
        """Yield the copies from others that give a sequence a stretch of a path."""
        while start < stop:
            source = int(self._holders(int(path[start]), start + 1)[0])
            yield from self._unparked(source, min(stop, int(self.sizes[source])))
            same = self._slots[source, start : min(stop, self.sizes[source])]
            differs = np.flatnonzero(same != path[start : start + len(same)])
            size = int(differs[0]) if len(differs) else len(same)
            yield Copy(source, sequence, start, start + size)
            start += size

    # ---------------------------------------------------------------- cells

    def _unparked(self, sequence: int, size: int) -> list[Step]:
        """Have the first tokens of a sequence be in cells; return what has to be done."""
        steps = list[Step]()
        while self.present[sequence] < size:
            parked = self._parked[sequence].pop()
            stops = {i: min(parked.stop, int(self.sizes[i])) for i in parked.sequences}
            for i, stop in stops.items():
                self.present[i] = stop
                if i != sequence:
                    self._parked[i].pop()
            self._count(max(stops.values()) - parked.start)
            steps.append(Unpark(parked.number, parked.start, stops))
        return steps

    def tidy(self) -> list[Step]:
        """Park what has been idle for long, and put cells together; return what has to be done.

        It is to be called between two batches. A token in a cell costs each row a little time, and
        to park it costs as much as it does some rows, and some more for each stretch of tokens.
        What has cost as much as to be parked and put back is parked, as one buys skis once their
        hire has come to their price.
        """
        num_rows = self._num_rows - self._num_ticked
        self._num_ticked = self._num_rows
        steps, num_present = list[Step](), int(np.count_nonzero(self.present))
        self._num_read += num_rows * self.num_cells
        if self._num_read > _ROWS_OF_LOOK * num_present:
            self._num_read = 0
            if (self._used[self.present > 0] < self._num_rows - _FEWEST_IDLE).any():
                for chain, below in self._chains(np.flatnonzero(self.present), 0):
                    steps += self._idle_parked(chain, below)
        self._waste += num_rows * (self._peak - self.num_cells)
        if self._waste > _ROWS_OF_MOVE * num_present + _FEWEST_IDLE * self.num_cells:
            self._waste, self._peak = 0, self.num_cells
            if self.num_cells:
                chains = [*_flat(self._chains(np.flatnonzero(self.present), 0))]
                if self._window:
                    chains = self._stretches(chains)
                steps.append(Compact(chains))
        return steps

    def _idle_parked(self, chain: Chain, below: list[_Tree]) -> list[Step]:
        """Park tokens and all behind them, or what is idle of these; return what has to be done."""
        chains = [chain, *_flat(below)]
        size = sum(one.stop - one.start for one in chains)
        num_idle = self._num_rows - int(self._used[chain.sequences].max())
        steps = list[Step]()
        if num_idle * size < _FEWEST_IDLE * size + _ROWS_OF_MOVE * len(chains):
            for own, others in below:
                steps += self._idle_parked(own, others)
            return steps
        for one in reversed(self._stretches(chains)):
            parked = _Parked(next(self._numbers), one.start, one.stop, [*one.sequences])
            for sequence in one.sequences:  # what is behind other tokens has gone first
                self._parked.setdefault(sequence, []).append(parked)
                self.present[sequence] = one.start
            steps.append(Park(parked.number, one))
        self._count(-size)
        return steps

    def _stretches(self, chains: Sequence[Chain]) -> list[Chain]:
        """Return tokens in stretches that are short enough to be saved.

        They end at multiples of a number, as windows do that are stretches of the text themselves.
        """
        found, most = list[Chain](), self._most_parked
        for chain in chains:
            ends = [*range(chain.start - chain.start % most + most, chain.stop, most), chain.stop]
            starts = [chain.start, *ends[:-1]]
            found += [Chain(*bounds, chain.sequences) for bounds in zip(starts, ends, strict=True)]
        return found

    def _chains(self, sequences: NDArray[np.intp], start: int) -> list[_Tree]:
        """Return the tokens in cells of sequences that agree up to a position, behind it."""
        sequences, found = sequences[self.present[sequences] > start], list[_Tree]()
        while len(sequences):
            kin = sequences[self._slots[sequences, start] == self._slots[sequences[0], start]]
            sequences = np.setdiff1d(sequences, kin)
            stop = int(self.present[kin].min())
            same = self._slots[kin, start:stop]
            differs = np.flatnonzero((same != same[0]).any(axis=0))
            stop = start + int(differs[0]) if len(differs) else stop
            found.append((Chain(start, stop, kin.tolist()), self._chains(kin, stop)))
        return found


_Tree: TypeAlias = "tuple[Chain, list[_Tree]]"
"""Tokens, and those behind them."""


def _flat(trees: list[_Tree]) -> Iterator[Chain]:
    """Yield all tokens, those before others first."""
    for chain, below in trees:
        yield chain
        yield from _flat(below)


@final
@dataclass(slots=True, eq=False)
class _Parked:
    """Tokens that are parked, and the sequences that hold them."""

    number: int
    start: int
    stop: int
    sequences: list[int]


MOST_PARKED: Final = 256
"""Tokens that are parked together, at most. All come back together, for which there have to be
cells, although some of them may not be held any more."""

_FEWEST_IDLE: Final = 8
"""Rows whose reading of a token takes as long as to park it and put it back (measured: 4 and 0.67
microseconds, with 23 kB a token)."""

_ROWS_OF_MOVE: Final = 1500
"""Rows whose reading of one token takes as long as to park a stretch, whatever its length."""

_ROWS_OF_LOOK: Final = 400
"""Rows whose reading of one token takes some times as long as to look at what a sequence holds."""
