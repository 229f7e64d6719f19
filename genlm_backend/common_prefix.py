"""The longest common prefix of two sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences of the same type."""
    # A bisection over slices, linear in the shorter length, compares elements without a loop in
    # Python. It needs slices that ``==`` compares as a whole, which a NumPy array's are not.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
