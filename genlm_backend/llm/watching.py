"""Whether somebody sees what is written to standard error, and bars only where somebody does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any


def is_watched() -> bool:
    """Whether standard error is a terminal, or a notebook's."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextlib.contextmanager
def bars_where_seen() -> Iterator[None]:
    """Let transformers draw its progress bars only where somebody sees them."""
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
