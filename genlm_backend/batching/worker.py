"""One thread that runs what it is given, in order, and never keeps its owner alive."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

Job = Callable[[], None]


class Worker:
    """Runs jobs one after another on a daemon thread that starts with the first of them.

    The thread holds its queue and nothing else, so that a worker nobody refers to is collected;
    it ends then, at ``stop()``, and at interpreter exit, each time after the job in hand.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize | None = None

    def put(self, job: Job) -> None:
        """Queue ``job``; an exception out of it would end the thread, so it must raise none.

        Not to be called by two threads at once.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name=self._name, daemon=True
            )
            self._thread.start()
            self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread)
        self._jobs.put(job)

    def stop(self) -> None:
        """Finish the jobs already queued and end the thread; again has no effect."""
        if self._finalizer is not None:
            self._finalizer()

    def is_current_thread(self) -> bool:
        """Whether the caller is a job of this worker."""
        return threading.current_thread() is self._thread


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or the last batch would be held until the next one comes


def _stop(jobs: queue.SimpleQueue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
