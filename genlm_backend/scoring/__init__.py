"""Texts, scored: surprisals of their words and tokens."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.scoring.surprisal import (
        Surprisal,
        Surprisals,
        surprisal,
        surprisal_sync,
    )

__all__ = ["Surprisal", "Surprisals", "surprisal", "surprisal_sync"]

__getattr__, __dir__ = lazy_names(
    globals(), dict.fromkeys(__all__, "genlm_backend.scoring.surprisal")
)
