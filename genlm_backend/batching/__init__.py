"""Turn many concurrent awaits into few batched calls; asyncio only, no tensors."""

from genlm_backend.batching.batcher import Batcher
from genlm_backend.batching.policy import BatchPolicy, BatchState, Decision
from genlm_backend.batching.statistics import BatcherStatistics

__all__ = ["BatchPolicy", "BatchState", "Batcher", "BatcherStatistics", "Decision"]
