"""Progress on standard error, drawn only if a user can see it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_told = False


def is_watched() -> bool:
    """Return whether a user sees standard error: in a terminal, notebook or via the parent."""
    return _told or sys.stderr.isatty() or "ipykernel" in sys.modules


def tell(is_watched: bool) -> None:
    """Set whether the parent process shows this process's standard error to a user."""
    global _told
    _told = is_watched


@contextlib.contextmanager
def bars_where_seen() -> Iterator[None]:
    """In this context, hide transformers' and the hub's progress bars if no user can see them."""
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
    """In this context, show ``what``, the name of a stage of long work, if a user can see it."""
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
    """Return a tqdm bar for ``total`` texts, hidden unless ``is_shown`` and a user can see it."""
    from tqdm.auto import tqdm

    is_hidden = not (is_shown and is_watched())
    return tqdm(total=total, desc=what, unit="text", disable=is_hidden)
