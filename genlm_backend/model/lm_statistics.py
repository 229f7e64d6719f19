"""Statistics of a model's batching and caching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from genlm_backend.batching.histogram import Histogram
from genlm_backend.queries.evaluator import EvaluatorCounts
from genlm_backend.readable import Readable

if TYPE_CHECKING:
    from genlm_backend.batching import BatcherStatistics
    from genlm_backend.queries.row import Row, RowCache


@dataclass(frozen=True, slots=True, repr=False)
class LMStatistics(Readable, EvaluatorCounts):
    """Counts since the model was loaded, and the present sizes of its caches.

    Attributes:
        num_awaits: Requests by any method: for rows, for readouts, for steps of particles, and for
            texts that are scored in one pass.
        num_batches: Batches evaluated.
        num_forwards: Forward passes of the model; a batch may take several (contexts of very
            different lengths, chunks of a long one) and a mock takes none.
        batch_sizes: Number of batches by number of distinct queries; a particle step is one query.
        tokens_computed: Tokens that went through the model, without padding.
        tokens_reused: Tokens that were found in the cache instead of being computed.
        row_cache_hits: Awaits answered from the row cache.
        num_joined: Awaits that joined an equal query, which was waiting or under evaluation.
        num_skipped: Queries never evaluated, because all their callers were cancelled.
        queue_time_seconds: How long the oldest query of each batch waited.
        batch_time_seconds: How long the evaluation of each batch took.
        row_bytes_used: Bytes of the cached rows.
        row_bytes_budget: Upper bound of ``row_bytes_used``.
        kv_bytes_used: Bytes of the cached keys and values.
        kv_bytes_budget: Upper bound of ``kv_bytes_used``.
        host_bytes_used: Bytes of the keys, values and recurrent states on the host.
        host_bytes_budget: Upper bound of ``host_bytes_used``.
        num_evicted_rows: Rows dropped to stay within ``row_bytes_budget``.
        num_evicted_tokens: Tokens whose keys and values were dropped to stay within the budget.
        num_recomputed_tokens: Evicted tokens that were computed again. The transformers and MLX
            backends remember only about the last 65,536 evicted tokens.
        num_tokens_to_host: Tokens whose keys and values were moved to the host.
        num_tokens_from_host: Tokens whose keys and values were moved back to the device.
        state_bytes_used: Bytes of the cached recurrent states, if the model has any.
        state_bytes_budget: Upper bound of ``state_bytes_used``, a part of ``kv_bytes_budget``.
        num_evicted_states: Recurrent states dropped to stay within the budget.
        num_states_to_host: Recurrent states that were moved to the host.
        num_states_from_host: Recurrent states that were moved back to the device.
        packed_weight_bytes: Bytes of second copies of weights, in a faster layout.
        num_captured_steps: Forward passes that replayed a captured CUDA graph (transformers).
    """

    _derived: ClassVar[tuple[str, ...]] = ("hit_rate", "mean_batch_size")

    num_awaits: int = 0
    num_batches: int = 0
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    row_cache_hits: int = 0
    num_joined: int = 0
    num_skipped: int = 0
    queue_time_seconds: Histogram = field(default_factory=Histogram)
    batch_time_seconds: Histogram = field(default_factory=Histogram)
    row_bytes_used: int = 0
    row_bytes_budget: int = 0
    num_evicted_rows: int = 0

    @classmethod
    def of(cls, batching: BatcherStatistics, counts: EvaluatorCounts, rows: RowCache[Row]) -> Self:
        """Combine the counts of a model's batcher, evaluator and row cache."""
        own = set(cls.__dataclass_fields__)
        same = {
            name: getattr(counted, name)
            for counted in (batching, counts)
            for name in own.intersection(counted.__dataclass_fields__)
        }
        return cls(
            **same,
            num_awaits=batching.num_submitted + rows.num_hits,
            row_cache_hits=rows.num_hits,
            row_bytes_used=rows.num_bytes,
            row_bytes_budget=rows.budget,
            num_evicted_rows=rows.num_evicted,
        )

    @property
    def mean_batch_size(self) -> float:
        """Mean number of distinct queries per batch; 0 before the first batch."""
        total = sum(size * count for size, count in self.batch_sizes.items())
        return total / self.num_batches if self.num_batches else 0.0

    @property
    def hit_rate(self) -> float:
        """``tokens_reused / (tokens_reused + tokens_computed)``; 0 before the first token."""
        total = self.tokens_reused + self.tokens_computed
        return self.tokens_reused / total if total else 0.0
