"""Derives the blocking form of a coroutine function or coroutine method from its definition."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, ParamSpec, TypeVar, final

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def blocking(verb: Callable[P, Coroutine[Any, Any, T]], answer: str = "answer") -> Callable[P, T]:
    """Return the blocking form of a coroutine function, named ``<verb>_sync``.

    The same body runs in the calling thread and never waits for an event loop. If ``verb`` is a
    method, ``self`` is a proxy, on which ``await self.other()`` runs ``other_sync()``. A body that
    needs to know in which form it runs awaits ``is_blocking()`` or ``in_form(lm)``.

    Args:
        verb: A coroutine function that, in blocking form, never waits for an event loop.
        answer: A noun for the result of ``verb``, for the docstring of the blocking form.
    """
    is_method = next(iter(inspect.signature(verb).parameters)) == "self"

    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> T:
        if is_method:
            args = (_Blocking(args[0]), *args[1:])
        return result_of(verb(*args, **kwargs))

    call.__name__, call.__qualname__ = f"{verb.__name__}_sync", f"{verb.__qualname__}_sync"
    call.__doc__ = (
        f"Return the same {answer} as ``{verb.__name__}``, blocking the calling thread.\n\n"
        "Works in a notebook too, whose event loop waits for it.\n"
    )
    return call


@types.coroutine
def is_blocking() -> Generator[None, bool | None, bool]:
    """Return whether the awaiting coroutine is run by ``result_of``, not by an event loop."""
    # A loop answers a bare yield with None, in its next turn; ``result_of`` answers with True. No
    # variable holds the form: it could stay set after an exception from a signal handler.
    answer = yield
    return answer is True


async def in_form(lm: S) -> S:
    """Return a proxy of ``lm`` with blocking methods if ``is_blocking()``; else return ``lm``."""
    blocks: Any = _Blocking(lm)
    return blocks if await is_blocking() else lm


def result_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for an event loop; return its result."""
    answer = None
    try:
        while coroutine.send(answer) is None:  # a bare yield of is_blocking, not a future
            answer = True
    except StopIteration as end:
        return end.value
    except RuntimeError as error:
        # Python turns a coroutine's StopIteration into a RuntimeError (PEP 479): turn it back.
        if isinstance(error.__cause__, StopIteration) and str(error).startswith("coroutine raised"):
            raise error.__cause__ from None
        raise
    coroutine.close()
    raise RuntimeError("the coroutine awaited a future, which needs an event loop")


@functools.lru_cache(maxsize=1024)  # saves some microseconds per draw
def _has_form(kind: type, name: str) -> bool:
    return hasattr(kind, f"{name}_sync")


@final
class _Blocking:
    """A proxy of a model or group: awaiting its method ``x`` runs ``x_sync``, if there is one."""

    __slots__ = ("_lm",)

    def __init__(self, lm: Any) -> None:
        self._lm = lm

    def __getattr__(self, name: str) -> Any:
        if not _has_form(type(self._lm), name):
            return getattr(self._lm, name)
        blocks = getattr(self._lm, f"{name}_sync")

        async def call(*args: Any, **kwargs: Any) -> Any:
            return blocks(*args, **kwargs)

        return call

    async def _together(self, coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        return [await coroutine for coroutine in coroutines]


def warn_caller(message: str) -> None:
    """Issue a warning that points at the line of user code that called this library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("genlm_backend."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
