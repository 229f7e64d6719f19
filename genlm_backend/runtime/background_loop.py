"""BackgroundLoop: an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast, final

T = TypeVar("T")


@final
class BackgroundLoop:
    """An event loop that runs on a daemon thread, from construction to ``close()``.

    One that nobody refers to any more ends by itself, and so does one that is there at the
    interpreter's exit: whoever waits there for something on it is told. The thread holds the event
    loop and nothing else.

    Args:
        name: Name of the thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(self._loop,), name=name, daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._loop, thread, os.getpid())

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop's thread, in the order of the calls.

        After ``close()`` nothing is called.
        """
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; return a future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_closed(self) -> bool:
        """Whether nothing new is run: after ``close()``, and at interpreter exit."""
        return not self._finalizer.alive or sys.is_finalizing()

    def close(self) -> None:
        """Cancel what is left, wait for it, and end the thread; again has no effect.

        A fork has no such thread, and nothing is done there.
        """
        self._finalizer()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_all())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


async def _cancel_all() -> None:
    """Cancel every other task, and those that begin meanwhile."""
    await asyncio.sleep(0)
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        # One that is cancelled before it has begun could settle nothing.
        begun = {task for task in others if _has_begun(task)}
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        await asyncio.sleep(0)


def _has_begun(task: asyncio.Task[Any]) -> bool:
    coroutine = cast(Coroutine[Any, Any, Any], task.get_coro())
    return inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int) -> None:
    if os.getpid() == process and thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join()
