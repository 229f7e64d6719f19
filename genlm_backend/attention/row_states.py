"""RowStates: the running states of the rows of a pass, of any backend."""

from __future__ import annotations

import abc
from typing import Any

from genlm_backend.prefix.nodes import Ints


class RowStates(abc.ABC):
    """The running states of the rows of one pass: before it and, once it is made, behind it."""

    @abc.abstractmethod
    def begin(self, layers: list[Any]) -> None:
        """Put the states that rows have into fresh layers of a cache, which the pass changes."""

    @abc.abstractmethod
    def behind(self, rows: Ints) -> list[Any]:
        """Return the states behind the last tokens of rows, ``[len(rows), *shape]`` each.

        Args:
            rows: Indices of the rows, ascending.
        """
