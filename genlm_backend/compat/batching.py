"""Batches of the concurrent callers of an event loop; the first caller computes the batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import Any, final

from genlm_backend.errors import QueryDroppedError

batch_stats: Counter[tuple[Any, ...]] = Counter()
"""Number of computed groups, by kind of query and number of entries."""


def take_batch_stats() -> Counter[tuple[Any, ...]]:
    """Return a copy of ``batch_stats``, and reset the counts."""
    counts = batch_stats.copy()
    batch_stats.clear()
    return counts


def batch_abandoned(exc: BaseException) -> QueryDroppedError:
    """Return the error for callers whose batch was lost because the caller that held it ended.

    Args:
        exc: The exception that ended the holder; it becomes the error's cause.
    """
    error = QueryDroppedError(f"the caller that held the batch ended with {exc!r}: call again")
    error.__cause__ = exc
    return error


def fail_futures(entries: Iterable[tuple[Any, ...]], exc: BaseException) -> None:
    """Set ``exc`` on the future of each entry (the last item), unless the future is done."""
    for *_, future in entries:
        if not future.done():
            future.set_exception(exc)


@final
class Window:
    """The waiting entries of one event loop, and whether a caller already holds the batch."""

    __slots__ = ("armed", "queue")

    def __init__(self) -> None:
        self.queue: list[tuple[Any, ...]] = []
        self.armed = False


async def join_batch(
    store: MutableMapping[asyncio.AbstractEventLoop, Window],
    entries: list[tuple[Any, ...]],
    *,
    linger: float = 0.0,
) -> list[tuple[Any, ...]] | None:
    """Add entries to the batch of the running event loop.

    The first caller holds the batch until one turn of the event loop adds no entry; with
    ``linger``, it then waits once and repeats this. It then gets all entries, and must resolve
    every future that is not done before it awaits anything.

    Args:
        store: A ``weakref.WeakKeyDictionary``, one for each kind of batch.
        entries: Tuples whose last item is an ``asyncio`` future.
        linger: Seconds that the first caller waits once for further entries.

    Returns:
        All entries of the batch, in order, if the caller holds the batch; otherwise ``None``.

    Raises:
        BaseException: The exception that ended the first caller's wait, such as a cancellation. The
            futures of the other callers get a ``QueryDroppedError`` (``BatchAbandoned``).
    """
    window = store.setdefault(asyncio.get_running_loop(), Window())
    window.queue.extend(entries)
    if window.armed:
        return None
    window.armed = True
    try:
        length = 0
        while length < len(window.queue):
            length = len(window.queue)
            await asyncio.sleep(0)
            if linger and length == len(window.queue):
                await asyncio.sleep(linger)
                linger, length = 0.0, 0
    except BaseException as exc:
        own = set(map(id, entries))
        others = [entry for entry in window.queue if id(entry) not in own]
        window.queue = []
        fail_futures(others, batch_abandoned(exc))
        raise
    finally:
        window.armed = False
    batch, window.queue = window.queue, []
    return batch
