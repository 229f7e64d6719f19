"""Attributes that vLLM must be able to look at when it starts."""

from __future__ import annotations

import sys
from typing import Any


def let_modules_be_scanned() -> None:
    """Let vLLM's engine for the CPU start where Numba has been imported, as tries do.

    It looks at the attributes of whatever is in a module. The library object of llvmlite takes any
    name that it is asked for one of a compiled function, ``__dict__`` too, and keeps in a table
    what it has found; so the table says that it has no attributes.
    """
    module: Any = sys.modules.get("llvmlite.binding.ffi")
    table = getattr(getattr(module, "lib", None), "_fntab", None)
    if isinstance(table, dict):
        table["__dict__"] = {}
