"""Texts, scored: surprisals of their words and tokens, prefixes, and the words that may follow."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.scoring.next_words import (
        Continuation,
        Continuations,
        continuations,
        continuations_sync,
    )
    from genlm_backend.scoring.prefixes import (
        PrefixLogprob,
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

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "Continuation": "genlm_backend.scoring.next_words",
        "Continuations": "genlm_backend.scoring.next_words",
        "PrefixLogprob": "genlm_backend.scoring.prefixes",
        "Surprisal": "genlm_backend.scoring.surprisals",
        "Surprisals": "genlm_backend.scoring.surprisals",
        "SurprisalsOfTexts": "genlm_backend.scoring.surprisals",
        "continuations": "genlm_backend.scoring.next_words",
        "continuations_sync": "genlm_backend.scoring.next_words",
        "prefix_logprob": "genlm_backend.scoring.prefixes",
        "prefix_logprob_sync": "genlm_backend.scoring.prefixes",
        "surprisal": "genlm_backend.scoring.surprisals",
        "surprisal_sync": "genlm_backend.scoring.surprisals",
    },
)
