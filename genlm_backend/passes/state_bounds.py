"""StateBounds: bounds on the tokens of one pass behind a running state."""

from __future__ import annotations

import sys
from typing import Final, NamedTuple, Self, final

_TIMES: Final = 20
"""Rows so many times farther off than others are computed in another way, beyond rounding."""

_MANY: Final = 32
"""Tokens that are more to compute again than a pass for the last ones of them takes."""

_MANY_BY_TWO: Final = 8
"""The same where whatever goes on from a context computes them again."""


@final
class StateBounds(NamedTuple):
    """Bounds on the tokens of a context in one pass behind a running state.

    The code of most models takes any number. Some scans begin anew whatever state there is, so
    that tokens have to come one by one; others round the steps of several tokens as they round
    those of a whole context, and a single one's otherwise.
    """

    fewest: int = 1
    most: int | None = None
    is_short: bool = False

    @classmethod
    def told_by(cls, at_once: float, one_by_one: float, rounding: float) -> Self:
        """Derive the bounds from the distances of a trial's rows."""
        if at_once > max(rounding, _TIMES * one_by_one):
            return cls(most=1)
        if one_by_one > max(rounding, _TIMES * at_once):
            return cls(fewest=2)
        return cls()

    @property
    def many(self) -> int:
        """Number of tokens from which on another pass costs less than computing them again."""
        if self.is_short:
            return sys.maxsize
        return _MANY if self.fewest == 1 else _MANY_BY_TWO

    def cut(self, num_tokens: int, begins: bool, most: int) -> int:
        """Return how many of some tokens go through the model next."""
        size = self.part(num_tokens, begins, most)
        # A context that is asked again, or scored on, goes on from before its last tokens.
        return size - self.fewest if size == num_tokens >= self.many else size

    def part(self, num_tokens: int, begins: bool, most: int) -> int:
        """Return ``most`` of some tokens, or a number near it where either part had too few."""
        fewest = 1 if begins else self.fewest
        most = max(most, fewest)
        if num_tokens - most >= self.fewest:
            return most
        shorter = num_tokens - self.fewest
        return shorter if num_tokens > most and shorter >= fewest else num_tokens
