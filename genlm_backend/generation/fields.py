"""Fields: a frozen configuration with some of them changed, by names that exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from genlm_backend.checks import check_names

C = TypeVar("C")


def check_fields(
    kind: type,
    names: Iterable[str],
    error: type[Exception],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise an error, as ``replaced`` does, unless every name is a field of a dataclass."""
    known = [field.name for field in dataclasses.fields(kind)]
    check_names(names, known, f"field of {kind.__name__}", error, elsewhere=elsewhere)


def replaced(
    config: C,
    fields: Mapping[str, Any],
    error: type[Exception],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> C:
    """Return a dataclass with fields changed.

    Args:
        config: The dataclass.
        fields: New values by name.
        error: What to raise for a name that is no field.
        elsewhere: Names of other libraries, and the field that each is here.
    """
    check_fields(type(config), fields, error, elsewhere)
    return dataclasses.replace(config, **fields)  # pyright: ignore[reportArgumentType]
