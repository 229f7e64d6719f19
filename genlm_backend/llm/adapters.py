"""AdapterNames: the adapters of a model by name, each with the number of its load."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from genlm_backend.errors import AdapterError, UnknownAdapterError
from genlm_backend.llm.base import UNKNOWN_ADAPTER, check_adapter_name
from genlm_backend.llm.query import Query


class AdapterNames:
    """Names of loaded adapters, each with a number that no other load has.

    A name can be used again for another adapter; a number cannot, so that what is asked, cached
    or waiting is told apart by it. Changed by one thread, read by any.
    """

    def __init__(self) -> None:
        self._loads: Mapping[str, int] = {}  # replaced whole, since any thread reads it
        self._numbers = itertools.count(1)

    def __iter__(self):
        return iter(self._loads)

    def check_free(self, name: str) -> None:
        """Raise an ``AdapterError`` if an adapter of that name is loaded."""
        if name in self._loads:
            raise AdapterError(f"there is an adapter named {name!r} already; see remove_lora()")

    def add(self, name: str) -> int:
        """Return the number of a new load."""
        number = next(self._numbers)
        self._loads = {**self._loads, name: number}
        return number

    def remove(self, name: str) -> int:
        """Forget a name; return the number of its load.

        Raises:
            UnknownAdapterError: If there is none of that name.
        """
        number = self.number(name)
        assert number is not None
        self._loads = {other: n for other, n in self._loads.items() if n != number}
        return number

    def clear(self) -> None:
        """Forget all names."""
        self._loads = {}

    def number(self, name: str | None) -> int | None:
        """Return the number of an adapter's load, or ``None`` for the base model.

        Raises:
            UnknownAdapterError: If there is no adapter of that name.
        """
        loads = self._loads
        if name is None:
            return None
        check_adapter_name(name)
        if name not in loads:
            known = ", ".join(map(repr, sorted(loads))) or "none are"
            raise UnknownAdapterError(
                f"{UNKNOWN_ADAPTER.format(name)} ({known}); see add_new_lora()"
            )
        return loads[name]

    def check_current(self, query: Query) -> None:
        """Raise an ``UnknownAdapterError`` if the adapter has gone since the query was made."""
        if query.lora_name is not None and self._loads.get(query.lora_name) != query.adapter_id:
            raise UnknownAdapterError(
                f"the LoRA adapter {query.lora_name!r} has been removed since it was asked for"
            )
