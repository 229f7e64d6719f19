"""BackgroundLoop: an asyncio event loop on a daemon thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar, final

from genlm_backend.errors import BatcherClosedError
from genlm_backend.runtime.forks import ProcessLock
from genlm_backend.runtime.threads import call_threadsafe

T = TypeVar("T")

_PASSES_AT_END: Final = 100
"""Turns of the loop in which tasks may still finish before ``close()`` cancels them."""


@final
class BackgroundLoop:
    """An event loop that runs on a daemon thread, from construction to ``close()``."""

    def __init__(self, name: str) -> None:
        self._name, self._is_closed, self._lock = name, False, ProcessLock()
        self._lock.claim()
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=_run, args=(self._loop,), name=f"genlm-{name}", daemon=True
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._loop, self._lock, thread)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop's thread; calls run in the order of ``call_soon``."""
        call_threadsafe(self._loop, function, *args)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; ``close()`` cancels it if it does not end soon."""
        with self._lock.here:  # so that ``close()`` cannot stop the loop after the check
            if not self.is_closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise self._error()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Block until a coroutine ends; return its result. An interrupt cancels the coroutine."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError:  # only the end of the loop cancels this future
            raise self._error() from None
        except BaseException:
            future.cancel()
            raise
        finally:
            del future  # its error's traceback refers to this frame: a cycle

    def _error(self) -> BatcherClosedError:
        if self._is_closed:
            return BatcherClosedError(f"{self._name} has been closed and accepts no more calls")
        return BatcherClosedError(f"{self._name} cannot answer: the interpreter is exiting")

    @property
    def is_closed(self) -> bool:
        """Whether ``submit`` raises a ``BatcherClosedError``: after ``close()``, and at exit."""
        return not self._finalizer.alive or sys.is_finalizing()

    def close(self) -> None:
        """End the thread once its tasks have ended or are cancelled; a second call does nothing."""
        self._is_closed = True
        self._finalizer()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_end_all())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


async def _end_all() -> None:
    """Wait for all other tasks, and cancel those left after ``_PASSES_AT_END`` turns."""
    for _ in range(_PASSES_AT_END):
        await asyncio.sleep(0)
        if len(asyncio.all_tasks()) == 1:
            break
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _end(loop: asyncio.AbstractEventLoop, lock: ProcessLock, thread: threading.Thread) -> None:
    if not thread.is_alive():  # in a fork, there is no such thread
        return
    with lock.here:  # or ``submit`` might use a stopped loop
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join()
