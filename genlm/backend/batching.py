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

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "BatchAbandoned": "genlm_backend.errors:QueryDroppedError",
        "batch_abandoned": "genlm_backend.compat.batching",
        "batch_stats": "genlm_backend.compat.batching",
        "fail_futures": "genlm_backend.compat.batching",
        "join_batch": "genlm_backend.compat.batching",
        "take_batch_stats": "genlm_backend.compat.batching",
    },
)
