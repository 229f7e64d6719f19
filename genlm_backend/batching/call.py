"""Call: a function for the worker thread, and the future of what comes of it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Generic, TypeVar, final

from genlm_backend.batching.waiter import presentable

T = TypeVar("T")


@final
class Call(Generic[T]):
    """A function that the worker thread is to run between two batches.

    Args:
        function: Called once, unless the future is cancelled before.

    Attributes:
        future: Future of what it returns or raises.
        is_wanted: Whether anybody may still want that.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.is_wanted = True
        self._function = function

    def run(self) -> None:
        """Call the function and settle the future; raises nothing."""
        if not self.future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            return
        try:
            result = self._function()
        except BaseException as raised:
            self.future.set_exception(presentable(raised))
        else:
            self.future.set_result(result)

    def result(self) -> T:
        """Block for the result; a thread that is interrupted meanwhile wants it no more."""
        try:
            return self.future.result()
        except BaseException:
            self.is_wanted = False
            self.future.cancel()
            raise
