"""llama-cpp-python, imported when it is first needed, and whether it has what is called of it."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import logging
import threading
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, Final

from genlm_backend.errors import MissingExtraError

logger = logging.getLogger(__name__)

_CALLS: Final = (
    "llama_adapter_lora_init", "llama_decode", "llama_get_logits", "llama_get_memory",
    "llama_init_from_model", "llama_log_set", "llama_max_parallel_sequences", "llama_memory_clear",
    "llama_memory_seq_cp", "llama_memory_seq_pos_min", "llama_memory_seq_rm",
    "llama_model_get_vocab", "llama_model_is_hybrid",
    "llama_model_is_recurrent", "llama_model_load_from_file", "llama_model_meta_val_str",
    "llama_model_n_swa", "llama_set_adapters_lora", "llama_state_seq_get_data",
    "llama_state_seq_get_size", "llama_state_seq_set_data",
    "llama_token_to_piece", "llama_tokenize", "llama_vocab_get_attr", "llama_vocab_is_eog",
)  # fmt: skip
"""Functions of the C interface that are called and that not every release has."""


@cache
def library() -> ModuleType:
    """Return the module that has the C interface."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise MissingExtraError(
            "AsyncLlamaCppLM needs llama-cpp-python, which is compiled as it is installed: "
            "pip install 'genlm-backend[llama-cpp]'. AsyncTransformer (backend 'hf') runs models "
            "in transformers' format."
        )
    from llama_cpp import llama_cpp

    missing = [name for name in _CALLS if not hasattr(llama_cpp, name)]
    fields = {name for name, *_ in llama_cpp.llama_context_params._fields_}
    missing += [f"llama_context_params.{name}" for name in ("kv_unified",) if name not in fields]
    if missing:
        version = importlib.metadata.version("llama-cpp-python")
        raise MissingExtraError(
            f"llama-cpp-python {version} lacks {', '.join(missing)}; AsyncLlamaCppLM has been seen "
            "with 0.3.36: pip install 'genlm-backend[llama-cpp]'"
        )
    llama_cpp.llama_backend_init()
    callback = llama_cpp.llama_log_callback(_heard)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    _kept.append(callback)
    return llama_cpp


_kept: Final = list[Any]()
"""The functions that llama.cpp calls, which have to stay."""


_ours = threading.local()
"""The errors that are collected on each thread, as ``errors``."""


def _heard(level: int, text: bytes, user_data: Any) -> None:
    """Take a line of llama.cpp's log, which is one for the whole process."""
    errors: list[str] | None = getattr(_ours, "errors", None)
    if errors is None:  # of another program's model
        from llama_cpp import _logger

        _logger.llama_log_callback(level, text, user_data)
        return
    line = text.decode("utf-8", "replace").strip()
    logger.debug("%s", line)
    if level == _ERROR and line:
        errors.append(line)


@contextlib.contextmanager
def log_caught() -> Iterator[list[str]]:
    """Collect what llama.cpp logs as errors on this thread, and keep it off the standard error.

    The lines go to this module's logger, at level ``DEBUG``.
    """
    before = getattr(_ours, "errors", None)
    errors = _ours.errors = list[str]()
    try:
        yield errors
    finally:
        _ours.errors = before


_ERROR: Final = 4
