"""Call: a function for the worker thread, and the future of what comes of it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

from genlm_backend.batching.evaluation import presentable

T = TypeVar("T")


@final
class Call(Generic[T]):
    """A function that the worker thread is to run between two batches.

    Args:
        function: Called once, unless the future is cancelled before.

    Attributes:
        future: Future of what it returns or raises, until it is run: the frames of an error that
            it raises know the call, and the call does not know the error then.
        is_wanted: Whether anybody may still want that.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.is_wanted = True
        self._function = function

    def run(self) -> None:
        """Call the function and settle the future; raises nothing."""
        if self.future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            _settle(self._taken(), *_called(self._function))

    def _taken(self) -> concurrent.futures.Future[T]:
        future = self.future
        del self.future
        return future

    def result(self, future: concurrent.futures.Future[T]) -> T:
        """Block for the result; a thread that is interrupted meanwhile wants it no more."""
        try:
            return future.result()
        except BaseException:
            self.is_wanted = False
            future.cancel()
            raise
        finally:
            del future  # which knows the error, which remembers this frame


def _called(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return what a function returns, and what it raises; see ``evaluated``."""
    try:
        return function(), None
    except BaseException as raised:
        return None, presentable(raised)


def _settle(
    future: concurrent.futures.Future[Any], result: Any, error: BaseException | None
) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
