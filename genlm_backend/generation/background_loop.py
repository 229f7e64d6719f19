"""BackgroundLoop: an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop that runs on a daemon thread, from construction to ``close()``.

    One that nobody refers to any more ends by itself, and so does one that is there at the
    interpreter's exit. The thread holds the event loop and nothing else.

    Args:
        name: Of the thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(self._loop,), name=name, daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, thread)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop's thread, in the order of the calls."""
        self._loop.call_soon_threadsafe(function, *args)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; return a future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what is left, wait for it, and end the thread; again has no effect."""
        self._finalizer()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join()
