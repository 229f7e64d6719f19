"""Concurrent work, by coroutines or on threads, that ends with all results or an error."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Await awaitables concurrently; return their results in order, or raise the first error."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # The first failure cancels the others and is raised itself, not as an ExceptionGroup.
        _ = [task.cancel() for task in tasks]
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # breaks the cycle of error, frame and task


def in_threads(work: Callable[[slice], object], count: int, num_threads: int) -> None:
    """Call ``work`` with slices of ``range(count)``: the first here, the others in new threads."""
    bounds = [count * i // num_threads for i in range(num_threads + 1)]
    own, *others = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    with ThreadPoolExecutor(max(1, len(others))) as threads:
        started = [threads.submit(work, part) for part in others]
        work(own)
    for one in started:
        one.result()
