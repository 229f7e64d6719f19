"""A verb is written once, as a coroutine function; the form of it that blocks is made here."""

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
    """Return the form of a coroutine function that blocks, named ``<verb>_sync``.

    It runs the same body in the calling thread, so that the body never waits and no event loop is
    needed. The ``self`` of a model's verb is then the model by its forms that block: an override of
    what the verb calls counts in both forms. A function asks whether it ``is_blocking``, or for a
    model ``in_form``.

    Args:
        verb: A coroutine function that awaits nothing else.
        answer: Its answer in a word, for ``help``.
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
    """Return whether ``result_of`` runs the coroutine that awaits this, and no event loop."""
    # A loop answers a bare yield with None, in its next turn. So no state of a thread or context
    # has to say it, which a signal could leave behind.
    answer = yield
    return answer is True


async def in_form(lm: S) -> S:
    """Return a model by its forms that block if ``result_of`` runs the coroutine, or as it is."""
    blocks: Any = _Blocking(lm)
    return blocks if await is_blocking() else lm


def result_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits, such as one of forms that block."""
    answer = None
    try:
        while coroutine.send(answer) is None:  # not a future, so it asks whether it is blocking
            answer = True
    except StopIteration as end:
        return end.value
    except RuntimeError as error:
        # Python makes this of a StopIteration that a caller's own readout raises (PEP 479).
        if isinstance(error.__cause__, StopIteration) and str(error).startswith("coroutine raised"):
            raise error.__cause__ from None
        raise
    coroutine.close()
    raise RuntimeError("the coroutine waited for an event loop")


@functools.lru_cache(maxsize=1024)  # or a draw would take some microseconds more
def _has_form(kind: type, name: str) -> bool:
    return hasattr(kind, f"{name}_sync")


@final
class _Blocking:
    """A model whose verbs are coroutines that end without a wait: each calls ``<verb>_sync``."""

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
    """Warn of the line outside of this library that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("genlm_backend."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
