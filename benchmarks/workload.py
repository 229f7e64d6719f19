"""Workload: what is measured, and how it reads in a table."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from typing import Any, ClassVar

Numbers = dict[str, Any]
Found = dict[str, Numbers]
"""Variant → numbers; lists of several rounds are put together."""
Row = tuple[str, str, str]
"""What, measured, aim."""

SHARE = "… share of it that products and reading keys and values take, alone"
"""The first column of a row that says how near to its limit something is."""


class Workload(ABC):
    """A thing to measure. Each variant is measured in a process of its own, in turns.

    Attributes:
        name: On the command line.
        table: The file of the docs that it is shown in.
        variants: Systems or sizes, measured one after the other in every round.
        peers: Variants that need ``--peer``.
        takes_peer: Whether the peer may be on its path; not where versions are compared.
        is_repeated: Whether rounds are processes; otherwise one process repeats by itself.
        needs: ``"vllm"``, ``"clients"``, ``"lm-eval"``, ``"mlx"`` or ``"device"`` where it is
            measured only if that is given.
    """

    name: ClassVar[str]
    table: ClassVar[str] = "benchmarks"
    variants: ClassVar[tuple[str, ...]] = ("",)
    peers: ClassVar[tuple[str, ...]] = ()
    takes_peer: ClassVar[bool] = True
    is_repeated: ClassVar[bool] = False
    needs: ClassVar[str | None] = None

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return (type(self).__doc__ or "").split("\n")[0]

    @abstractmethod
    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        """Measure one variant, in a fresh process; plain numbers and lists of them."""

    def rows(self, found: Found) -> list[Row]:
        """Return what to show of it in a table of three columns."""
        return []

    def markdown(self, found: Found) -> str:
        """Return it whole, for a table of its own."""
        lines = ["| what | measured | aim |", "|---|---|---|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.rows(found))])


def median(values: list[float]) -> float:
    """Of any number of rounds."""
    return statistics.median(values)


def medians(numbers: Numbers) -> dict[str, float]:
    """The medians of whatever is a list of numbers."""
    return {
        name: statistics.median(values)
        for name, values in numbers.items()
        if isinstance(values, list) and values and all(isinstance(v, (int, float)) for v in values)
    }


def merged(rounds: list[Numbers]) -> Numbers:
    """Put the lists of several rounds together; of what is no list, the last counts."""
    whole: Numbers = {}
    for numbers in rounds:
        for name, value in numbers.items():
            if isinstance(value, list):
                whole[name] = whole.get(name, []) + value
            elif isinstance(value, dict) and isinstance(whole.get(name), dict):
                whole[name] = merged([whole[name], value])
            else:
                whole[name] = value
    return whole
