"""Keywords of JSON schemas that rule nothing out where they are."""

from __future__ import annotations

from typing import Any

from genlm_backend.generation.grammar.schema_keywords import ANNOTATIONS
from genlm_backend.generation.grammar.schema_numbers import is_number

_OF_TYPES = {
    "uniqueItems": "array", "contains": "array", "minContains": "array", "maxContains": "array",
    "unevaluatedItems": "array", "dependentRequired": "object", "dependentSchemas": "object",
    "dependencies": "object", "unevaluatedProperties": "object",
}  # fmt: skip
"""Keywords that no constraint keeps to, and the type of values that each is about."""


def is_idle(keyword: str, schema: dict[str, Any], types: tuple[str, ...], draft: int) -> bool:
    """Tell whether a keyword that no constraint keeps to rules nothing out where it is.

    Args:
        keyword: A keyword of the schema.
        schema: The schema that has it.
        types: The types of values that the schema allows.
        draft: The draft that the schema is of.
    """
    value = schema[keyword]
    if keyword in _OF_TYPES and _OF_TYPES[keyword] not in types:
        return True
    if keyword in ("not", "nullable"):
        return value is False
    if keyword == "uniqueItems":
        most = schema.get("maxItems")
        return value is False or (is_number(most) and most <= 1)
    if keyword in ("unevaluatedItems", "unevaluatedProperties"):
        return is_anything(value)
    if keyword in ("contains", "minContains", "maxContains"):
        least = schema.get("minContains")
        is_counted = draft >= 2019 and is_number(least) and least == 0
        return "contains" not in schema or (is_counted and "maxContains" not in schema)
    if keyword in ("if", "then", "else"):
        return "if" not in schema or not (_binds(schema, "then") or _binds(schema, "else"))
    if keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        parts = value.values() if isinstance(value, dict) else [False]
        return all(part == [] or is_anything(part) for part in parts)
    return False


def is_anything(schema: object) -> bool:
    """Tell whether every value is known to fit a schema, as it is ``true`` or has no keyword."""
    if not isinstance(schema, dict):
        return schema is True
    return all(name in ANNOTATIONS or name.startswith("x-") for name in schema)


def _binds(schema: dict[str, Any], branch: str) -> bool:
    """Tell whether a value may be kept to ``then``, or to ``else``, behind an ``if``."""
    is_never = schema["if"] is False if branch == "then" else is_anything(schema["if"])
    return not is_never and not is_anything(schema.get(branch, True))
