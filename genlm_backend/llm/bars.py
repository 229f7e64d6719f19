"""The progress bars of transformers, only where somebody sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from genlm_backend.llm.watching import is_watched


@contextlib.contextmanager
def bars_where_seen() -> Iterator[None]:
    """Let transformers draw its bars on a terminal and in a notebook, and nowhere else."""
    from transformers.utils import logging

    if is_watched() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


@contextlib.contextmanager
def gguf_bar_where_seen() -> Iterator[None]:
    """Do the same for the bar of reading a GGUF file, which no setting of transformers reaches."""
    from transformers import modeling_gguf_pytorch_utils

    module: Any = modeling_gguf_pytorch_utils
    before = getattr(module, "tqdm", None)
    if is_watched() or before is None:
        yield
        return
    module.tqdm = partial(before, disable=True)
    try:
        yield
    finally:
        module.tqdm = before
