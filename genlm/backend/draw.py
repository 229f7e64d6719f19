"""Draws in one batch, by the import name of the release after genlm-backend 0.3.1."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.compat.draw import (
        DRAW_METHODS,
        draw_from,
        gumbel_max,
        inverse_cdf,
        logp_at,
        logsumexp_from,
        multinomial,
        set_draw_method,
    )

__all__ = [
    "DRAW_METHODS",
    "draw_from",
    "gumbel_max",
    "inverse_cdf",
    "logp_at",
    "logsumexp_from",
    "multinomial",
    "set_draw_method",
]

__getattr__, __dir__ = lazy_names(globals())
