"""Way: how an ``Attend`` over a store is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from genlm_backend.cache import KVStore
from genlm_backend.llm.hf.attend.base import Attend


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
