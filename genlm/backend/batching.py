"""Batches of concurrent callers, by the import name of the release after genlm-backend 0.3.1."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.compat.batching import (
        batch_abandoned,
        batch_stats,
        fail_futures,
        join_batch,
        take_batch_stats,
    )
    from genlm_backend.errors import QueryDroppedError as BatchAbandoned

__all__ = [
    "BatchAbandoned",
    "batch_abandoned",
    "batch_stats",
    "fail_futures",
    "join_batch",
    "take_batch_stats",
]

__getattr__, __dir__ = lazy_names(globals())
