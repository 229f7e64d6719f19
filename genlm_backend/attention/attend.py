"""Attend: from a packed batch to what the model attends to; and how one is made over a store."""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.attention.packing import PackedBatch
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.reading import Reading
from genlm_backend.prefix import KVStore


class Attend(abc.ABC):
    """A way for the new tokens of a forward pass to attend to those before them."""

    @abc.abstractmethod
    def reading(self, past: Paths, num_new: NDArray[np.int64]) -> Reading | None:
        """Return how a pass reads what its rows have cached, made anew.

        A batch that carries it, or what it is a few decode steps later, is read so; one that
        carries none is read as this says.

        Args:
            past: What the rows have cached.
            num_new: Number of new tokens of each row: ``[B]``.

        Returns:
            The reading, or ``None`` where this way has no use for one.
        """

    @abc.abstractmethod
    def attending(self, batch: PackedBatch, model: Any) -> AbstractContextManager[dict[str, Any]]:
        """Prepare one forward pass, which is made within the context.

        With the pass, the keys and values of the batch's new tokens go to the slots that it names.

        Returns:
            A context of what the model takes beside token ids and positions.
        """


@final
@dataclass(frozen=True, slots=True)
class Way:
    """A way to attend to keys and values in slots.

    Attributes:
        over: Makes it over a store.
        probing: Makes it so that contexts of a few tokens go through all of it, in passes with so
            many columns more than their longest past has: as beside a context that is longer.
        copies: Whether it copies the columns of every row.
        is_called: Whether the model has to call it, as the attention that its configs name.
    """

    over: Callable[[KVStore], Attend]
    probing: Callable[[KVStore, int], Attend]
    copies: bool
    is_called: bool
