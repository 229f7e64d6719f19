"""Asking: what a model needs of whatever answers its questions."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from genlm_backend.batching.policy import BatchPolicy
from genlm_backend.batching.statistics import BatcherStatistics

Q = TypeVar("Q", contravariant=True)
R = TypeVar("R")
T = TypeVar("T")


class Asking(Protocol[Q, R]):
    """A ``Batcher``, or several that look like one; see there."""

    @property
    def policy(self) -> BatchPolicy:
        """When a batch goes."""
        ...

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that it belongs to."""
        ...

    async def submit(self, query: Q) -> R:
        """Return the result for ``query``."""
        ...

    async def submit_all(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, in order."""
        ...

    def submit_sync(self, queries: Iterable[Q]) -> list[R]:
        """Return the results for ``queries``, blocking this thread."""
        ...

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` between the batches already sent and what is asked later; block."""
        ...

    def call_soon(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run ``function`` between the batches already sent and what is asked later."""
        ...

    def check_open(self) -> None:
        """Raise what a query that is asked now would raise at once."""
        ...

    def check_wanted(self) -> None:
        """Raise if nobody waits any more for what the calling thread is doing."""
        ...

    def set_policy(self, **fields: Any) -> None:
        """Replace fields of the policy."""
        ...

    def flush(self) -> None:
        """Let everything that waits go now."""
        ...

    def drop(self, reason: str = ...) -> int:
        """Settle every waiter with a ``QueryDroppedError``; return how many there were."""
        ...

    def statistics(self) -> BatcherStatistics:
        """Return the counts so far."""
        ...

    def close(self) -> None:
        """Drop everybody and end; again has no effect."""
        ...
