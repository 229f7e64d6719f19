"""Uncompiled: passes that run the code of a model as it is written, where its owner compiled it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Final, final

import torch


def is_compiled(module: Any) -> bool:
    """Return whether a module's owner has compiled it, or its ``forward``, in its place."""
    own = vars(module)
    if own.get("_compiled_call_impl") is not None:
        return True
    return "forward" in own and hasattr(own["forward"], "_torchdynamo_orig_callable")


@final
class _Stance:
    """The stance of torch's compiler, which is one for the whole process, whatever passes run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_passes = 0
        self._forced: Any = None

    def force(self) -> None:
        """Have compiled code run as it is written until it is released as often."""
        with self._lock:
            if not self._num_passes:
                self._forced = torch.compiler.set_stance("force_eager")
            self._num_passes += 1

    def release(self) -> None:
        """Give the compiler back its stance after the last pass."""
        with self._lock:
            self._num_passes -= 1
            if not self._num_passes:
                self._give_back()

    def renew(self) -> None:
        """Forget all passes, and the lock, which a thread of a parent process may hold."""
        self._lock, self._num_passes = threading.Lock(), 0
        self._give_back()

    def _give_back(self) -> None:
        forced, self._forced = self._forced, None
        if forced is not None:
            forced.__exit__(None, None, None)


_stance: Final = _Stance()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stance.renew)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Have a compiled model run as it is written, and other compiled code meanwhile.

    The passes here are of another shape each, and attend by way of functions of ours that a
    compiler cannot see through: it compiles again and again, and stops with an ``AssertionError``.
    """
    _stance.force()
    try:
        yield
    finally:
        _stance.release()
