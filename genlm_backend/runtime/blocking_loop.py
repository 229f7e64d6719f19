"""Loop: an event loop on a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar, final

from genlm_backend.errors import BatcherClosedError

T = TypeVar("T")


@final
class Loop:
    """An event loop that begins when it is first needed.

    Args:
        name: What errors call it, and a part of its thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: weakref.finalize | None = None
        self._is_closed = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns, blocking this thread; interrupted, it is cancelled.

        Raises:
            BatcherClosedError: After ``close()``, and if the interpreter exits meanwhile.
        """
        with self._lock:  # so that what is begun is begun before the loop is told to stop
            if self._is_closed or self._is_exiting():
                coroutine.close()
                raise self._error()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=_run, args=(self._loop,), name=f"genlm-{self._name}-callers", daemon=True
                )
                thread.start()
                self._stop = weakref.finalize(
                    self, _end, self._loop, thread, self._lock, os.getpid()
                )
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:  # by what ends the loop, since nobody else has the future
            raise self._error() from None
        except BaseException:
            future.cancel()
            raise
        finally:
            del future  # which knows the error, which remembers this frame

    def _is_exiting(self) -> bool:
        return sys.is_finalizing() or (self._stop is not None and not self._stop.alive)

    def _error(self) -> BatcherClosedError:
        if self._is_closed:
            return BatcherClosedError(f"{self._name} has been closed and answers no more")
        return BatcherClosedError(f"{self._name} cannot answer: the interpreter exits")

    def close(self) -> None:
        """End the thread, once what is under way has been told; again has no effect."""
        with self._lock:
            self._is_closed = True
        if self._stop is not None:
            self._stop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, lock: threading.Lock, process: int
) -> None:
    if os.getpid() != process:  # a fork has no such thread
        return
    with lock:  # or a coroutine might be sent to a loop that takes no more
        if not loop.is_closed():
            loop.call_soon_threadsafe(_stop_soon, loop, 100)
    if thread is not threading.current_thread():
        thread.join(1)


def _stop_soon(loop: asyncio.AbstractEventLoop, num_passes: int) -> None:
    """Stop a loop once it has nothing more to tell; what goes on for too long is cancelled."""
    tasks = asyncio.all_tasks(loop)
    if not tasks:
        loop.call_soon(loop.stop)  # after what tells the callers of the last of them
        return
    if num_passes == 0:
        for task in tasks:
            task.cancel()
    loop.call_soon(_stop_soon, loop, num_passes - 1)
