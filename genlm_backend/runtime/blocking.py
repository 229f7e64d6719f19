"""Blocking forms of coroutine functions, with the same bodies; warnings about a caller's line."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@types.coroutine
def is_blocking() -> Generator[None, bool | None, bool]:
    """Return whether a ``blocking_form`` runs the coroutine that awaits this, and no event loop."""
    # A loop answers a bare yield with None, in its next turn. So no state of a thread or context
    # has to say it, which a signal could leave behind.
    answer = yield
    return answer is True


def blocking_form(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return ``…_sync`` of a coroutine function that awaits nothing else where it is blocking.

    It runs in the calling thread: no thread or loop is made for a call.
    """

    @functools.wraps(verb)
    def blocking(*args: P.args, **options: P.kwargs) -> T:
        coroutine, answer = verb(*args, **options), None
        try:
            while True:
                coroutine.send(answer)
                answer = True
        except StopIteration as end:
            return end.value

    blocking.__name__ = blocking.__qualname__ = f"{verb.__name__}_sync"
    blocking.__doc__ = f"""Return the same as ``{verb.__name__}``, blocking the calling thread.

    Works in a notebook too, whose event loop waits for it.
    """
    return blocking


def warn_caller(message: str) -> None:
    """Warn of the line outside of this library that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("genlm_backend."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
