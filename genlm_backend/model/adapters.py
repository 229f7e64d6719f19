"""AdapterNames: the adapters of a model by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from genlm_backend.checks import checked, instance, text
from genlm_backend.errors import UnknownAdapterError
from genlm_backend.model.query import UNKNOWN_ADAPTER, Adapter
from genlm_backend.model.scoring import Question

ADAPTER_CHECKS: Final = {"lora_name": text, "lora_path": instance((str, Path), "a path")}
"""Checks of what ``add_new_lora`` takes."""


def check_adapter_name(lora_name: Any) -> None:
    """Raise an ``UnknownAdapterError`` unless ``lora_name`` is a name, of whatever adapter."""
    checked(ADAPTER_CHECKS, {"lora_name": lora_name}, UnknownAdapterError)


@final
class AdapterNames:
    """Adapters that are loaded, by name.

    A name can be used again for another adapter; the number of its load cannot, so that what is
    asked, cached or waiting is told apart by it. An adapter whose name another one has taken
    answers what was asked with it until it is removed. Changed by one thread, read by any.
    """

    def __init__(self) -> None:
        # Both are replaced whole, since any thread reads them.
        self._named: Mapping[str, Adapter] = {}
        self._loaded: frozenset[Adapter] = frozenset()
        self._numbers = itertools.count(1)

    def new(self, name: str) -> Adapter:
        """Return an adapter of that name, which is not loaded yet."""
        plain = str.__str__(name)  # and no subclass, which another process may not have
        return Adapter(plain, next(self._numbers))

    def add(self, adapter: Adapter) -> Adapter | None:
        """Bind a name to an adapter that has been loaded; return the one that had the name."""
        replaced = self._named.get(adapter.name)
        self._loaded |= {adapter}
        self._named = {**self._named, adapter.name: adapter}
        return replaced

    def remove(self, adapter: Adapter) -> None:
        """Forget an adapter."""
        self._named = {name: a for name, a in self._named.items() if a != adapter}
        self._loaded -= {adapter}

    def get(self, name: str) -> Adapter:
        """Return the adapter of a name."""
        named = self._named
        if name not in named:
            known = ", ".join(map(repr, sorted(named))) or "none are"
            raise UnknownAdapterError(
                f"{UNKNOWN_ADAPTER.format(name)} ({known}); see add_new_lora()"
            )
        return named[name]

    def check(self, query: Question) -> None:
        """Raise the error of a query whose adapter has gone since it was asked."""
        error = self.error_of(query)
        if error is not None:
            raise error

    def error_of(self, query: Question) -> UnknownAdapterError | None:
        """Return the error of a query whose adapter has gone since it was asked, or ``None``."""
        adapter = query.adapter
        if adapter is None or adapter in self._loaded:
            return None
        return UnknownAdapterError(
            f"the LoRA adapter {adapter.name!r} has been removed or replaced since it was asked for"
        )
