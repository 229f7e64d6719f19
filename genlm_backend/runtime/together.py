"""together: the results of awaitables that run at the same time, or the first error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await coroutines at the same time and return their results in order.

    When one fails, the others are cancelled and waited for, and its exception is raised as it is:
    a caller who makes one mistake gets that error, not a group of one.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        task = None
        tasks.clear()  # an error that one of them met remembers this frame
