"""Constants of JSON schemas, as texts."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from genlm_backend.generation.grammar.schema_numbers import is_exact, is_number, spellings

_ESCAPED_BY_NUMBER = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")


def is_plain(value: Any) -> bool:
    """Tell whether llguidance writes a constant as it is."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    if isinstance(value, str):
        return not _ESCAPED_BY_NUMBER.search(value)
    if is_number(value):
        return is_exact(value) and "e" not in repr(float(value))
    return True


def scalar_texts(value: Any) -> list[str]:
    """Return the texts of a constant that is neither a list nor an object."""
    if is_number(value):
        return spellings(value)
    return [json.dumps(value, ensure_ascii=False)]


def type_of(value: Any) -> str:
    """Return the type of a value, the narrowest one."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if is_number(value):
        return "integer" if value == int(value) else "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def key_of(value: Any) -> Any:
    """Return what values have in common that are equal for JSON, where no boolean is a number."""
    if isinstance(value, list):
        return ("array", *map(key_of, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, key_of(part)) for name, part in value.items()))
    return (type_of(value), value)


def constants(schema: dict[str, Any]) -> list[Any] | None:
    """Return the constants that a schema is restricted to; ``None`` if it is to none."""
    if "const" in schema:
        listed = schema.get("enum", [schema["const"]])
        keys = {key_of(value) for value in listed} if isinstance(listed, list) else set()
        return [schema["const"]] if key_of(schema["const"]) in keys else []
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def doubles(value: Any) -> Any:
    """Return plain JSON whose numbers are integers and doubles."""
    if isinstance(value, dict):
        return {name: doubles(part) for name, part in value.items()}
    if isinstance(value, list):
        return [doubles(part) for part in value]
    return float(value) if isinstance(value, Decimal) else value
