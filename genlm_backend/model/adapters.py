"""AdapterNames: the adapters of a model by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from genlm_backend.checks import checked, instance, text
from genlm_backend.errors import AdapterError, UnknownAdapterError
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
    asked, cached or waiting is told apart by it. Changed by one thread, read by any.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Adapter] = {}  # replaced whole, since any thread reads it
        self._numbers = itertools.count(1)

    def new(self, name: str) -> Adapter:
        """Return the adapter of that name, which is not loaded yet.

        Raises:
            AdapterError: If an adapter of that name is loaded.
        """
        if name in self._loaded:
            raise AdapterError(f"there is an adapter named {name!r} already; see remove_lora()")
        plain = str.__str__(name)  # and no subclass, which another process may not have
        return Adapter(plain, next(self._numbers))

    def add(self, adapter: Adapter) -> None:
        """Make an adapter known that has been loaded."""
        self._loaded = {**self._loaded, adapter.name: adapter}

    def remove(self, adapter: Adapter) -> None:
        """Forget an adapter."""
        self._loaded = {name: a for name, a in self._loaded.items() if a != adapter}

    def get(self, name: str) -> Adapter:
        """Return the adapter of a name.

        Raises:
            UnknownAdapterError: If there is none.
        """
        loaded = self._loaded
        if name not in loaded:
            known = ", ".join(map(repr, sorted(loaded))) or "none are"
            raise UnknownAdapterError(
                f"{UNKNOWN_ADAPTER.format(name)} ({known}); see add_new_lora()"
            )
        return loaded[name]

    def check(self, query: Question) -> None:
        """Raise the error of a query whose adapter has gone since it was asked."""
        error = self.error_of(query)
        if error is not None:
            raise error

    def error_of(self, query: Question) -> UnknownAdapterError | None:
        """Return the error of a query whose adapter has gone since it was asked, or ``None``."""
        adapter = query.adapter
        if adapter is None or self._loaded.get(adapter.name) == adapter:
            return None
        return UnknownAdapterError(
            f"the LoRA adapter {adapter.name!r} has been removed since it was asked for"
        )
