"""Way: how an ``MlxAttend`` over a store is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from genlm_backend.llm.mlx.attend.base import MlxAttend
from genlm_backend.llm.mlx.store import MlxStore


@final
@dataclass(frozen=True, slots=True)
class Way:
    """A way to attend to keys and values in slots.

    Attributes:
        over: Makes it over a store.
        probing: Makes it so that contexts of a few tokens go through all of it.
    """

    over: Callable[[MlxStore], MlxAttend]
    probing: Callable[[MlxStore], MlxAttend]
