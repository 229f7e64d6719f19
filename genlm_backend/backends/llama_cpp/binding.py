"""Imports llama-cpp-python on first use, and redirects llama.cpp's log."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import threading
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, Final

from genlm_backend.errors import MissingExtraError

logger = logging.getLogger(__name__)


@cache
def library() -> ModuleType:
    """Return llama-cpp-python's module of C functions, with the backend initialised."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise MissingExtraError(
            "AsyncLlamaCppLM needs llama-cpp-python, which is compiled during installation: pip "
            "install 'genlm-backend[llama-cpp]'. AsyncTransformer (backend 'hf') runs models in "
            "transformers' format."
        )
    from llama_cpp import llama_cpp

    llama_cpp.llama_backend_init()
    callback = llama_cpp.llama_log_callback(_heard)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    _kept.append(callback)
    return llama_cpp


_kept: Final = list[Any]()
"""Callbacks that llama.cpp calls; this list keeps them from the garbage collector."""


_ours = threading.local()
"""Thread-local storage: ``errors`` is the list of the innermost ``log_caught``, or ``None``."""


def _heard(level: int, text: bytes, user_data: Any) -> None:
    """Handle a line of llama.cpp's log, which the whole process shares."""
    errors: list[str] | None = getattr(_ours, "errors", None)
    if errors is None:  # outside ``log_caught``, llama-cpp-python gets the line
        from llama_cpp import _logger

        _logger.llama_log_callback(level, text, user_data)
        return
    line = text.decode("utf-8", "replace").strip()
    logger.debug("%s", line)
    if level == _ERROR and line:
        errors.append(line)


@contextlib.contextmanager
def log_caught() -> Iterator[list[str]]:
    """Collect llama.cpp's errors on this thread in a list; log all its lines at ``DEBUG``."""
    before = getattr(_ours, "errors", None)
    errors = _ours.errors = list[str]()
    try:
        yield errors
    finally:
        _ours.errors = before


_ERROR: Final = 4
