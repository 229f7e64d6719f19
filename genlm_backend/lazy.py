"""Lazily imported public names (PEP 562), so that importing a package loads nothing heavy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    namespace: dict[str, Any], names: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package."""

    package = namespace["__name__"]

    def __getattr__(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")  # which sets the attribute
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, original = names[name].partition(":")
        value = getattr(importlib.import_module(module), original or name)
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*namespace, *names, *submodules} - {"TYPE_CHECKING", "lazy_names"})

    return __getattr__, __dir__
