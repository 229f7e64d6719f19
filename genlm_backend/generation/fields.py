"""Fields: a frozen configuration with some of them changed, by names that exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from genlm_backend.checks import check_names

C = TypeVar("C")


def replaced(config: C, fields: Mapping[str, Any], error: type[Exception]) -> C:
    """Return a dataclass with fields changed.

    Args:
        config: The dataclass.
        fields: New values by name.
        error: What to raise for a name that is no field.
    """
    known = [field.name for field in dataclasses.fields(config)]  # pyright: ignore[reportArgumentType]
    check_names(fields, known, f"field of {type(config).__name__}", error)
    return dataclasses.replace(config, **fields)  # pyright: ignore[reportArgumentType]
