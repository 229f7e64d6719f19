"""Progress, which is drawn on standard error only if somebody sees it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_told = False


def is_watched() -> bool:
    """Whether standard error is a terminal, or a notebook's."""
    return _told or sys.stderr.isatty() or "ipykernel" in sys.modules


def tell(is_watched: bool) -> None:
    """Set whether somebody sees the output of this process, printed by its parent."""
    global _told
    _told = is_watched


@contextlib.contextmanager
def bars_where_seen() -> Iterator[None]:
    """Turn the progress bars of transformers and of the hub off if nobody sees them."""
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
def stage(what: str) -> Iterator[None]:
    """Name a stage of long work while it lasts, on standard error, if somebody sees it."""
    if not is_watched():
        yield
        return
    said = f"{what} …"
    print(said, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(said)}\r", end="", file=sys.stderr, flush=True)


def progress_bar(total: int, is_shown: bool, what: str = "sampling") -> Any:
    """Return a bar for ``total`` texts, which shows nothing unless ``is_shown``."""
    from tqdm.auto import tqdm

    is_hidden = not (is_shown and is_watched())
    return tqdm(total=total, desc=what, unit="text", disable=is_hidden)
