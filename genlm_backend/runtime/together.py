"""Work at the same time, by coroutines or on threads: all of it, or the first error."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Await awaitables at the same time; return their results in order."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # One failure cancels the others and is raised as it is, not as a group of one.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_threads(work: Callable[[slice], object], count: int, num_threads: int) -> None:
    """Call ``work`` with consecutive slices of ``range(count)``, one in each thread."""
    bounds = [count * i // num_threads for i in range(num_threads + 1)]
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    errors: list[BaseException] = []

    def guarded(part: slice) -> None:
        try:
            work(part)
        except BaseException as error:
            errors.append(error)

    helpers = [threading.Thread(target=guarded, args=(part,)) for part in parts[1:]]
    for helper in helpers:
        helper.start()
    guarded(parts[0])
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
