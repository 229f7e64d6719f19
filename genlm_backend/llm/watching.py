"""Whether somebody sees what is written to standard error."""

from __future__ import annotations

import sys


def is_watched() -> bool:
    """Whether standard error is a terminal, or a notebook's."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
