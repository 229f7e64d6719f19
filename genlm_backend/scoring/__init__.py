"""Surprisals of words, tokens and characters, probabilities of prefixes, probable next words."""

from genlm_backend.scoring.search import (
    Continuation,
    Continuations,
    PrefixLogprob,
    continuations,
    continuations_sync,
    prefix_logprob,
    prefix_logprob_sync,
)
from genlm_backend.scoring.surprisals import (
    Surprisal,
    Surprisals,
    SurprisalsOfTexts,
    surprisal,
    surprisal_sync,
)

__all__ = [
    "Continuation",
    "Continuations",
    "PrefixLogprob",
    "Surprisal",
    "Surprisals",
    "SurprisalsOfTexts",
    "continuations",
    "continuations_sync",
    "prefix_logprob",
    "prefix_logprob_sync",
    "surprisal",
    "surprisal_sync",
]
