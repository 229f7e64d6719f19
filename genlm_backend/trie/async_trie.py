"""AsyncTokenCharacterTrie: awaitable prefix weights, with one Batcher per operation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self, final, get_args

from genlm_backend.batching import Batcher, BatcherStatistics, BatchPolicy
from genlm_backend.checks import checked, instance, integer, number, shown
from genlm_backend.errors import BatcherClosedError, UnknownBackendError
from genlm_backend.readable import Readable
from genlm_backend.runtime.closing import Closing
from genlm_backend.runtime.forks import OfOneProcess, ProcessLock
from genlm_backend.trie.base import VocabularyTrie
from genlm_backend.trie.sequential import TokenCharacterTrie
from genlm_backend.trie.weights import Operation, Weights, check_weights

Backend = Literal["parallel", "sequential"]


@dataclass(frozen=True, slots=True, repr=False)
class TrieStatistics(Readable):
    """Counts and durations of each operation, since the trie was created or last shut down.

    Attributes:
        sum: Batches and queries of ``weight_sum`` and ``mass_sum``.
        max: Batches and queries of ``weight_max``.
        log_sum: Batches and queries of ``log_weight_sum``.
    """

    sum: BatcherStatistics
    max: BatcherStatistics
    log_sum: BatcherStatistics


@final
class AsyncTokenCharacterTrie(OfOneProcess, Closing):
    """A trie whose prefix weights many coroutines can await at once.

    Each operation has a worker thread, which evaluates concurrent queries in batches, so that the
    event loop stays free. Any number of event loops and threads may use one trie, concurrently or
    in turn. Weights are checked before they are queued, so an invalid query fails alone.
    Cancelling one caller does not affect the others. Each result owns its memory.

    The first query of an operation starts its thread. ``cleanup()`` ends all threads; later queries
    start new ones.

    Args:
        trie: The trie that evaluates the batches.
        batch_size: Number of queries in a batch, at most.
        timeout: Seconds that the first query of a batch may wait for others. It usually waits
            less, since a batch starts once the event loop submits no new query.

    Attributes:
        trie: The trie; use it for all that needs no ``await``, such as ``children``.

    Raises:
        OptionTypeError: (``TypeError``) If an argument has a wrong type.
        OptionError: (``ValueError``) If ``batch_size`` is below 1, or ``timeout`` negative or NaN.
    """

    def __init__(
        self, trie: VocabularyTrie, *, batch_size: int = 128, timeout: float = 0.02
    ) -> None:
        options = checked(_CHECKS, {"batch_size": batch_size, "timeout": timeout})
        self.trie = _TRIE("trie", trie)
        self._policy = BatchPolicy(max_batch_size=options["batch_size"], timeout=timeout)
        self._lock = ProcessLock()
        self._batchers: dict[Operation, Batcher[Weights, Any]] = {}

    @classmethod
    def from_vocab(
        cls,
        vocab: Iterable[Any],
        backend: Backend | None = None,
        *,
        batch_size: int = 128,
        timeout: float = 0.02,
        **kwargs: Any,
    ) -> Self:
        """Build a trie over ``vocab`` and make it awaitable.

        Args:
            vocab: The vocabulary; see ``VocabularyTrie``.
            backend: Kind of the trie: "parallel" (``ParallelTokenCharacterTrie``), "sequential"
                (``TokenCharacterTrie``), or ``None``: parallel if there is a CUDA device, or if
                ``device`` or ``as_tensor`` is given; otherwise sequential, which is faster on a
                CPU.
            batch_size: Number of queries in a batch, at most.
            timeout: Seconds that the first query of a batch may wait for others.
            **kwargs: Options of the trie's constructor, such as ``device="cuda"`` and
                ``as_tensor=True``.

        Raises:
            UnknownBackendError: If there is no such ``backend``.
            Exception: Any error of this class's constructor or of the trie's.
        """
        checked(_CHECKS, {"batch_size": batch_size, "timeout": timeout})
        if not isinstance(backend, str | None) or backend not in (None, *get_args(Backend)):
            raise UnknownBackendError(
                f"unknown trie backend {shown(backend)}; known are {', '.join(get_args(Backend))}"
            )
        make: Callable[..., VocabularyTrie] = TokenCharacterTrie
        if backend != "sequential":
            from genlm_backend.trie import parallel

            is_wanted = bool(kwargs.keys() & {"device", "as_tensor"})
            if backend == "parallel" or is_wanted or parallel.cuda_is_available():
                make = parallel.ParallelTokenCharacterTrie
        trie = make(vocab, **kwargs)
        trie.prepare()
        return cls(trie, batch_size=batch_size, timeout=timeout)

    # ---------------------------------------------------------------- queries

    async def weight_sum(self, ws: Weights) -> Any:
        """Return the sum of the weights of all tokens below each node: ``[num_nodes]``.

        Args:
            ws: Weights ``[len(trie.decode)]``. Do not modify them before the result has arrived.

        Raises:
            WeightsError: If the length is wrong.
            WeightsTypeError: If the elements are not real numbers.
            QueryDroppedError: If ``cleanup()`` or ``shutdown()`` came before the result.
            BatcherClosedError: If the interpreter has ended the worker threads.
            ForkedError: In a fork of the process that made the first query.
        """
        return await self._submit("sum", ws)

    async def weight_max(self, ws: Weights) -> Any:
        """Return the largest token weight below each node; otherwise like ``weight_sum``."""
        return await self._submit("max", ws)

    async def log_weight_sum(self, ws: Weights) -> Any:
        """Return the log-sum-exp of the weights below each node; otherwise like ``weight_sum``."""
        return await self._submit("log_sum", ws)

    async def mass_sum(self, ws: Weights) -> Any:
        """Return ``weight_sum(ws)``: this is the older name of that method."""
        return await self._submit("sum", ws)

    async def _submit(self, operation: Operation, ws: Weights) -> Any:
        weights = check_weights(ws, len(self.trie.decode))
        self._lock.claim()
        while True:
            batcher = self._batchers.get(operation) or self._started()[operation]
            try:
                return await batcher.submit(weights)
            except BatcherClosedError:
                if self._batchers.get(operation) is batcher:  # the interpreter is exiting
                    raise
                # shutdown() ran after the lookup: the next iteration starts new batchers.

    # ---------------------------------------------------------------- statistics and threads

    def statistics(self) -> TrieStatistics:
        """Return the counts and durations of each operation's queries and batches so far."""
        batchers = self._started()
        return TrieStatistics(
            **{operation: batcher.statistics() for operation, batcher in batchers.items()}
        )

    def start(self) -> None:
        """Do nothing; kept for older programs. Queries start the worker threads."""

    def _started(self) -> dict[Operation, Batcher[Weights, Any]]:
        with self._lock.here:
            if not self._batchers:
                for operation in get_args(Operation):
                    numbers = itertools.count()
                    self._batchers[operation] = Batcher(
                        lambda rows, trie=self.trie, kind=operation: trie.evaluate_rows(kind, rows),
                        self._policy,
                        # A key per query, so that equal weights do not share a result.
                        key=lambda weights, numbers=numbers: next(numbers),
                        name=f"trie-{operation}",
                    )
            return dict(self._batchers)

    def shutdown(self) -> None:
        """End the worker threads after their current batches, and free the trie's spare buffers.

        All waiting callers, also those of the current batches, get a ``QueryDroppedError``. A
        second call has no effect, and a later query starts new threads. In a fork of the process
        that made the first query, this does nothing.
        """
        if self._lock.is_foreign:
            return
        with self._lock.here:
            batchers, self._batchers = list(self._batchers.values()), {}
        for batcher in batchers:
            batcher.close()
        self.trie.release()

    async def cleanup(self) -> None:
        """End the worker threads like ``shutdown()``, without blocking the event loop."""
        await self.aclose()

    def close(self) -> None:
        """End the worker threads like ``shutdown()``."""
        self.shutdown()


_CHECKS = {"batch_size": integer(1), "timeout": number(0, is_finite=False)}

_TRIE = instance(
    VocabularyTrie,
    "a TokenCharacterTrie or a ParallelTokenCharacterTrie (for a vocabulary, use from_vocab)",
)
