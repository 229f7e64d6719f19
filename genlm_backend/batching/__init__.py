"""Turn many concurrent awaits into few batched calls; asyncio only, no tensors."""

from genlm_backend.batching.batcher import Batcher
from genlm_backend.batching.policy import BatcherStatistics, BatchPolicy, BatchState, Decision

__all__ = ["BatchPolicy", "BatchState", "Batcher", "BatcherStatistics", "Decision"]
