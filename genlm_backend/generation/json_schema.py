"""JSON schemas as llguidance gets them: checked, because it passes over what it does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from genlm_backend.errors import ConstraintError

_HONOURED = frozenset({
    "$ref", "allOf", "anyOf", "const", "enum", "format", "oneOf", "type",
    "additionalItems", "items", "maxItems", "minItems", "prefixItems",
    "additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties",
    "required",
    "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf",
    "maxLength", "minLength", "pattern",
})  # fmt: skip
"""The keywords that llguidance keeps to."""

_ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "definitions", "id",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
    "description", "discriminator", "example", "examples", "externalDocs", "readOnly", "title",
    "writeOnly", "xml",
})  # fmt: skip
"""The keywords that rule nothing out, of JSON Schema and OpenAPI."""

_ENVELOPE = frozenset({"name", "description", "strict", "schema"})
"""What OpenAI's API has around a schema."""

_OF_ONE = ("items", "additionalItems", "additionalProperties")
_OF_SEVERAL = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
_OF_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def check_schema(schema: Mapping[str, Any] | bool | str) -> dict[str, Any]:
    """Return a JSON schema as an object of plain JSON.

    Args:
        schema: A JSON schema, or the JSON text of one.

    Raises:
        ConstraintError: (``ValueError``) If it is no JSON, neither an object nor a boolean, or
            has a keyword anywhere that no constraint keeps to.
    """
    try:
        plain = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        json.dumps(plain, ensure_ascii=False).encode()  # lone surrogates are no JSON text
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is no JSON: {error}") from error
    if plain is True:
        return {}
    if plain is False:
        raise ConstraintError("no JSON value fits the schema false")
    if not isinstance(plain, dict):
        raise ConstraintError(f"a JSON schema is an object or a boolean, got {plain!r}")
    _check_keywords(plain)
    return plain


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


def _check_keywords(schema: dict[str, Any]) -> None:
    rest: list[Any] = [schema]
    while rest:
        one = rest.pop()
        if not isinstance(one, dict):
            continue  # a boolean, or what llguidance says the fault of
        for keyword in one:
            _check_keyword(keyword)
        rest.extend(_subschemas(one))


def _check_keyword(keyword: str) -> None:
    known = _HONOURED | _ANNOTATIONS
    if keyword in known or keyword.startswith("x-"):
        return
    near = get_close_matches(keyword, known, n=1, cutoff=0.85)
    hint = f"did you mean {near[0]!r}?" if near else "annotations of your own begin with 'x-'"
    raise ConstraintError(f"no constraint keeps to the JSON schema's keyword {keyword!r}; {hint}")


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    yield from (schema[name] for name in _OF_ONE if name in schema)
    for name in _OF_SEVERAL:
        if isinstance(schemas := schema.get(name), list):
            yield from schemas
    for name in _OF_NAMED:
        if isinstance(schemas := schema.get(name), dict):
            yield from schemas.values()


def _listed(names: Any) -> str:
    return ", ".join(map(repr, sorted(names)))
