"""Turns the queries of many tasks and threads into few batched calls; does not import torch."""

from genlm_backend.batching.batched import Batched, batched
from genlm_backend.batching.batcher import Batcher
from genlm_backend.batching.histogram import Histogram
from genlm_backend.batching.policy import BatcherStatistics, BatchPolicy, BatchState, Decision

__all__ = [
    "BatchPolicy",
    "BatchState",
    "Batched",
    "Batcher",
    "BatcherStatistics",
    "Decision",
    "Histogram",
    "batched",
]
