"""The peer: genlm-backend 0.3.1, which has the import name that this library has too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import genlm_backend


def add_peer(folder: str | None) -> None:
    """Make ``genlm.backend`` mean the peer, from where ``make bench`` has put it."""
    if folder:
        sys.path.insert(0, folder)
        assert has_peer(), f"{folder} holds no genlm-backend 0.3.1"


def has_peer() -> bool:
    """Whether ``genlm.backend`` means the peer and not this library."""
    spec = importlib.util.find_spec("genlm.backend")
    ours = Path(genlm_backend.__file__).parent.parent / "genlm"
    if spec is None or spec.origin is None:
        return False
    return not Path(spec.origin).is_relative_to(ours)
