"""AsyncTokenCharacterTrie: awaited prefix weights, one Batcher for each operation."""

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
    """Counts of the batches of each operation since the trie was made or cleaned up.

    Attributes:
        sum: Batches of ``weight_sum`` and ``mass_sum``.
        max: Batches of ``weight_max``.
        log_sum: Batches of ``log_weight_sum``.
    """

    sum: BatcherStatistics
    max: BatcherStatistics
    log_sum: BatcherStatistics


@final
class AsyncTokenCharacterTrie(OfOneProcess, Closing):
    """A trie whose prefix weights can be awaited, by many coroutines at once.

    All concurrent awaits of an operation are evaluated as one batch on a worker thread, so that
    the event loop stays free. Any number of event loops and threads may use one trie, at the
    same time or one after another. Weights are checked before they are queued: a query that is
    wrong fails alone. Cancelling one caller does not affect the others. Each answer owns its
    memory.

    Nothing has to be started: the first query does. ``cleanup()`` ends the worker threads;
    a query after it starts new ones.

    Args:
        trie: The trie that evaluates the batches.
        batch_size: Number of queries in a batch, at most.
        timeout: Seconds that the first query of a batch may wait for others. It waits less as a
            rule, since a batch is evaluated as soon as the event loop brings no new query.

    Attributes:
        trie: The trie as given; it has ``children``, ``word2leaf`` and what else is not awaited.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of another type.
        OptionError: (``ValueError``) If ``batch_size`` or ``timeout`` is too small.
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
                (``TokenCharacterTrie``), or ``None``: the parallel one where there is a CUDA
                device, or where ``device`` or ``as_tensor`` is given; the sequential one, which
                is the faster on a CPU, elsewhere.
            batch_size: Number of queries in a batch, at most.
            timeout: Seconds that the first query of a batch may wait for others.
            **kwargs: Options of the trie's constructor, such as ``device="cuda"`` and
                ``as_tensor=True``.

        Raises:
            UnknownBackendError: If there is no such ``backend``.
            Exception: What the trie's constructor raises.
        """
        checked(_CHECKS, {"batch_size": batch_size, "timeout": timeout})
        if not isinstance(backend, str | None) or backend not in (None, *get_args(Backend)):
            raise UnknownBackendError(
                f"unknown trie backend {shown(backend)}; there are {', '.join(get_args(Backend))}"
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

    # ---------------------------------------------------------------- asking

    async def weight_sum(self, ws: Weights) -> Any:
        """Return the sum of the weights of all tokens below each node: ``[num_nodes]``.

        Args:
            ws: Weights ``[len(trie.decode)]``, not to be modified before the call returns.

        Raises:
            WeightsError: If the length is another.
            WeightsTypeError: If the elements are not real numbers.
            QueryDroppedError: If ``cleanup()`` or ``shutdown()`` came first.
            BatcherClosedError: When the interpreter has ended the worker threads.
            ForkedError: In a fork of the process that first asked.
        """
        return await self._submit("sum", ws)

    async def weight_max(self, ws: Weights) -> Any:
        """Return the largest weight of all tokens below each node; as with ``weight_sum``."""
        return await self._submit("max", ws)

    async def log_weight_sum(self, ws: Weights) -> Any:
        """Return the log-sum-exp of all tokens below each node; as with ``weight_sum``."""
        return await self._submit("log_sum", ws)

    async def mass_sum(self, ws: Weights) -> Any:
        """Return ``weight_sum(ws)``; its older name."""
        return await self._submit("sum", ws)

    async def _submit(self, operation: Operation, ws: Weights) -> Any:
        weights = check_weights(ws, len(self.trie.decode))
        self._lock.claim()
        while True:
            batcher = self._batchers.get(operation) or self._started()[operation]
            try:
                return await batcher.submit(weights)
            except BatcherClosedError:
                if self._batchers.get(operation) is batcher:  # the interpreter exits
                    raise
                # Shut down between the two: the next attempt starts anew.

    # ---------------------------------------------------------------- keeping house

    def statistics(self) -> TrieStatistics:
        """Return counts of the batches of each operation."""
        batchers = self._started()
        return TrieStatistics(
            **{operation: batcher.statistics() for operation, batcher in batchers.items()}
        )

    def start(self) -> None:
        """Do nothing, for programs that call it: the first query starts the worker threads."""

    def _started(self) -> dict[Operation, Batcher[Weights, Any]]:
        with self._lock.here:
            if not self._batchers:
                for operation in get_args(Operation):
                    numbers = itertools.count()
                    self._batchers[operation] = Batcher(
                        lambda rows, trie=self.trie, kind=operation: trie.evaluate_rows(kind, rows),
                        self._policy,
                        # No two are one query, whatever the weights: each answer owns its memory.
                        key=lambda weights, numbers=numbers: next(numbers),
                        name=f"trie-{operation}",
                    )
            return dict(self._batchers)

    def shutdown(self) -> None:
        """End the worker threads, after the batches that are being evaluated.

        Callers that still wait get a ``QueryDroppedError``. A second call has no effect, and a
        later query starts new threads. In a fork of the process that first asked, nothing is
        done.
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
    "a TokenCharacterTrie or a ParallelTokenCharacterTrie (from_vocab takes a vocabulary)",
)
