"""Recurrent states of a GGUF model, each in a llama.cpp sequence of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.forward_batch import BatchStates
from genlm_backend.prefix.budgets import most_rows
from genlm_backend.prefix.nodes import Ints


@final
class SequenceStateLayout(NamedTuple):
    """The size of the recurrent state after one token."""

    bytes_per_state: int


@final
class SequenceStateStore:
    """Recurrent states by number, like ``StatePool``; llama.cpp sequences stand for the states."""

    # llama.cpp copies a state by sharing its memory.
    def __init__(
        self,
        layout: SequenceStateLayout,
        num_states: int,
        first: int,
        copy: Callable[[int, int], None],
    ) -> None:
        self.layout, self.num_states = layout, num_states
        self._first, self._copy = first, copy

    def read(self, numbers: Ints) -> list[NDArray[np.int64]]:
        """Return the sequences that hold the states: one array, ``[len(numbers)]``."""
        return [np.asarray(numbers, np.int64) - 1 + self._first]

    def write(self, numbers: Ints, states: Sequence[NDArray[np.int64]]) -> None:
        """Store states, given as sequences in the format of ``read``, under these numbers."""
        (sequences,) = self.read(numbers)
        for source, sequence in zip(states[0].tolist(), sequences.tolist(), strict=True):
            self._copy(source, sequence)

    def is_finite(self, numbers: Ints) -> bool:
        """Return ``True`` without reading states: an overflow shows as NaN in later rows."""
        return True


@final
class SequenceRowStates(BatchStates):
    """The sequences with the recurrent states of ``B`` rows, before and after one pass."""

    after: NDArray[np.int64]  # [B]

    def __init__(self, before: NDArray[np.int64] | None) -> None:
        self.before = before

    def begin(self, layers: list[Any]) -> None:
        """Do nothing: llama.cpp finds a row's state by its sequence."""

    def behind(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the sequences with the rows' states after a pass: one array, ``[len(rows)]``."""
        return [self.after[rows]]


@final
class SequenceCounts(NamedTuple):
    """How many of llama.cpp's sequences hold contexts, kept states, and the states of a pass."""

    num_contexts: int
    num_states: int = 0
    most_rows: int = 0

    @property
    def total(self) -> int:
        """Number of all sequences, including one that stays empty."""
        return sum(self) + 1

    @classmethod
    def of_states(cls, num_states: int) -> Self:
        most = most_rows(num_states)
        return cls(max(num_states, 2 * most), num_states, most)

    @classmethod
    def within(cls, most: int) -> Self:
        """Return counts with as many states as ``most`` sequences allow, but with at least one."""
        counts = map(cls.of_states, range(most, 1, -1))
        return next((found for found in counts if found.total <= most), cls.of_states(1))
