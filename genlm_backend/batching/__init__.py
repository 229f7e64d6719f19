"""Turn many concurrent queries, of tasks or threads, into few batched calls; no tensors."""

from genlm_backend.batching.batched import Batched, batched
from genlm_backend.batching.batcher import Batcher
from genlm_backend.batching.policy import BatcherStatistics, BatchPolicy, BatchState, Decision

__all__ = [
    "BatchPolicy",
    "BatchState",
    "Batched",
    "Batcher",
    "BatcherStatistics",
    "Decision",
    "batched",
]
