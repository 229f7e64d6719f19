"""Readouts of a program's own with faults, in a module that any process can import."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from genlm_backend.llm import Readout, Row, RowQuery


@dataclass(unsafe_hash=True)
class Last(Readout):
    """The log-probability of the last token; ``extra`` is what a program has put beside it."""

    query: RowQuery
    extra: Any = None
    wanted: ClassVar[str] = "a float"

    @classmethod
    def of_rows(cls, readouts, rows):
        return rows[:, -1].tolist()

    def is_answered_by(self, answer, vocab_size):
        return isinstance(answer, float)


class Whatever(Last):
    """A kind that takes whatever it gets."""

    def is_answered_by(self, answer, vocab_size):
        return True


class Leaving(Last):
    """A kind that wants to end the program."""

    @classmethod
    def of_rows(cls, readouts, rows):
        raise SystemExit(3)


class LeavingLate(Last):
    """A kind that wants to end the program when its answers are looked at."""

    def is_answered_by(self, answer, vocab_size):
        raise SystemExit(3)


class WholeRow(Whatever):
    """A kind that answers with rows of its own making."""

    @classmethod
    def of_rows(cls, readouts, rows):
        return [Row(torch.zeros(rows.shape[1])) for _ in readouts]


class Unsayable(Last):
    """A kind with answers that nobody can print."""

    @classmethod
    def of_rows(cls, readouts, rows):
        return [_Unsayable() for _ in readouts]


class _Unsayable:
    def __repr__(self):
        raise ZeroDivisionError("no repr")
