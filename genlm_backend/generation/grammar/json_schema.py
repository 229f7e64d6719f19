"""JSON schemas as callers give them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.schema_document import SchemaDocument
from genlm_backend.generation.grammar.schema_literals import doubles
from genlm_backend.generation.grammar.schema_values import check_values

_ENVELOPE = frozenset({"name", "description", "strict", "schema"})
"""What OpenAI's API has around a schema."""

_LARGEST_EXPONENT = 400


def check_schema(schema: Mapping[str, Any] | bool | str) -> SchemaDocument:
    """Return a JSON schema with all the schemas in it.

    Args:
        schema: A JSON schema, or the JSON text of one.

    Raises:
        ConstraintError: (``ValueError``) If it is no JSON, neither an object nor a boolean, or
            has a keyword or a value anywhere that no constraint keeps to.
    """
    if hasattr(schema, "model_json_schema"):
        kind = schema if isinstance(schema, type) else type(schema)
        raise ConstraintError(
            f"{kind.__name__} is a class of pydantic, and a JSON schema is wanted: "
            f"{kind.__name__}.model_json_schema() makes it"
        )
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        plain = json.loads(text, parse_float=_decimal, parse_constant=_decimal)
        json.dumps(doubles(plain), ensure_ascii=False).encode()  # lone surrogates are no JSON text
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is no JSON: {error}") from error
    if plain is False:
        raise ConstraintError("no JSON value fits the schema false")
    if plain is not True and not isinstance(plain, dict):
        raise ConstraintError(f"a JSON schema is an object or a boolean, got {plain!r}")
    document = SchemaDocument({} if plain is True else plain)
    check_values(document)
    return document


def _decimal(text: str) -> Decimal:
    number = Decimal(text)
    if not number.is_finite() or abs(number.adjusted()) > _LARGEST_EXPONENT:
        raise ValueError(f"{text} is no number that can be written")
    return number


def unwrapped(schema: Any) -> Any:
    """Return the schema of a ``response_format``, with what OpenAI's API has around it or without.

    Raises:
        ConstraintError: (``ValueError``) If there is something around it that is not understood.
    """
    if not isinstance(schema, Mapping) or "schema" not in schema:
        if isinstance(schema, Mapping) and {"name", "strict"} & schema.keys():
            raise ConstraintError(f"json_schema has {_listed(schema)}, and no 'schema'")
        return schema
    if unknown := sorted(schema.keys() - _ENVELOPE):
        raise ConstraintError(
            f"beside a 'schema', json_schema may have {_listed(_ENVELOPE - {'schema'})}; "
            f"got {_listed(unknown)}"
        )
    return schema["schema"]


def _listed(names: Any) -> str:
    return ", ".join(map(repr, sorted(names)))
