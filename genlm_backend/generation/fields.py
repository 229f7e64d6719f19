"""Fields: a frozen configuration with some of them changed, by names that exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

C = TypeVar("C")


def replaced(
    config: C, fields: Mapping[str, Any], error: type[Exception], more: Collection[str] = ()
) -> C:
    """Return a dataclass with fields changed.

    Args:
        config: The dataclass.
        fields: New values by name.
        error: What to raise for a name that is no field.
        more: Names beside its fields.
    """
    known = [field.name for field in dataclasses.fields(config)]  # pyright: ignore[reportArgumentType]
    for name in fields:
        if name not in known and name not in more:
            near = get_close_matches(name, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise error(f"{name} is no field of {type(config).__name__}{hint}")
    return dataclasses.replace(config, **fields)  # pyright: ignore[reportArgumentType]
