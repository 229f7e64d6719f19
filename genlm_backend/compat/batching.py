"""Batches of the concurrent callers of an event loop; the first caller computes the batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import Any, final

from genlm_backend.errors import QueryDroppedError

batch_stats: Counter[tuple[Any, ...]] = Counter()
"""Number of groups computed so far, by kind of query and number of entries in the group."""


def take_batch_stats() -> Counter[tuple[Any, ...]]:
    """Return a copy of ``batch_stats``, and reset the counts."""
    counts = batch_stats.copy()
    batch_stats.clear()
    return counts


def batch_abandoned(exc: BaseException) -> QueryDroppedError:
    """Return the error for the other callers of a batch whose first caller failed to compute it.

    Args:
        exc: The exception that ended the first caller; it becomes the error's cause.
    """
    error = QueryDroppedError(f"the caller computing this batch ended with {exc!r}: call again")
    error.__cause__ = exc
    return error


def fail_futures(entries: Iterable[tuple[Any, ...]], exc: BaseException) -> None:
    """Set ``exc`` on the future of each entry (its last item), unless the future is done."""
    for *_, future in entries:
        if not future.done():
            future.set_exception(exc)


@final
class Window:
    """The waiting entries of one event loop, and whether a first caller is collecting them."""

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

    The first caller waits until a turn of the event loop adds no entry. With ``linger``, it then
    sleeps once and waits for another such turn. It gets all entries, and must resolve every future
    that is not done before it awaits anything.

    Args:
        store: A ``weakref.WeakKeyDictionary`` of windows by event loop; one per kind of batch.
        entries: Tuples whose last item is an ``asyncio`` future.
        linger: Seconds for which the first caller sleeps once, so that more entries may arrive.

    Returns:
        For the first caller, all entries of the batch, in order; for other callers, ``None``.

    Raises:
        BaseException: The exception that ended the first caller's wait, such as a cancellation. The
            other callers' futures get a ``QueryDroppedError``, also named ``BatchAbandoned``.
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
