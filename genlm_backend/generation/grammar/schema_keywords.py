"""Keywords of JSON schemas: a table of those that are kept to, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
"""The types of JSON values; an integer is a number."""


@final
@dataclass(frozen=True)
class Keyword:
    """A keyword that texts are kept to."""

    kept: str
    types: tuple[str, ...] = ()
    schemas: Literal["", "one", "list", "one or list", "map"] = ""
    since: int = 4


_NUMBER, _STRING, _ARRAY, _OBJECT = ("number",), ("string",), ("array",), ("object",)
_BOUND = "exact; refused if a double cannot hold it, unless the type is integer"
_OF_LENGTH = "in characters, each of which has one spelling"

HONOURED: dict[str, Keyword] = {
    "$ref": Keyword("a place in the schema, an anchor or an $id in it; no place elsewhere"),
    "allOf": Keyword("as llguidance merges them", schemas="list"),
    "anyOf": Keyword("whole", schemas="list"),
    "oneOf": Keyword("refused if no two options are known to be apart", schemas="list"),
    "const": Keyword("exact numbers, one spelling of strings", since=6),
    "enum": Keyword("exact numbers, one spelling of strings"),
    "type": Keyword("integers are written without a fraction"),
    "maximum": Keyword(_BOUND, _NUMBER),
    "minimum": Keyword(_BOUND, _NUMBER),
    "exclusiveMaximum": Keyword(_BOUND, _NUMBER),
    "exclusiveMinimum": Keyword(_BOUND, _NUMBER),
    "multipleOf": Keyword("refused if llguidance would take another number for it", _NUMBER),
    "maxLength": Keyword(_OF_LENGTH, _STRING),
    "minLength": Keyword(_OF_LENGTH, _STRING),
    "pattern": Keyword("what matches by ECMA 262 and by Python's re alike", _STRING),
    "format": Keyword("those of schema_formats; annotations are not, others refused", _STRING),
    "items": Keyword("whole", _ARRAY, "one or list"),
    "prefixItems": Keyword("whole", _ARRAY, "list", since=2020),
    "additionalItems": Keyword("beside a list of items, as only there it counts", _ARRAY, "one"),
    "maxItems": Keyword("whole", _ARRAY),
    "minItems": Keyword("whole", _ARRAY),
    "properties": Keyword("in the order in which they are declared", _OBJECT, "map"),
    "patternProperties": Keyword("refused if two patterns overlap", _OBJECT, "map"),
    "additionalProperties": Keyword("keys may be written several times", _OBJECT, "one"),
    "propertyNames": Keyword("written as other keywords, or refused", _OBJECT, "one", since=6),
    "required": Keyword("whole", _OBJECT),
    "maxProperties": Keyword("as far as llguidance counts them", _OBJECT),
    "minProperties": Keyword("up to one more than those required, as keys may repeat", _OBJECT),
}
"""The keywords that are kept to; others are refused unless they are annotations, or idle there."""

SIZES = frozenset(
    f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties")
)
"""The keywords whose values are numbers of parts."""

ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema",
    "$vocabulary", "definitions", "id",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
    "description", "discriminator", "example", "examples", "externalDocs", "readOnly", "title",
    "writeOnly", "xml",
})  # fmt: skip
"""The keywords that rule nothing out, of JSON Schema and OpenAPI."""

DEFINITIONS = ("$defs", "definitions")
"""The annotations that hold schemas by name."""

_DRAFTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}


def draft_of(uri: object) -> int:
    """Return the draft that a ``$schema`` names; the newest one where it names none of them."""
    if not isinstance(uri, str):
        return 2020
    return _DRAFTS.get(uri.rstrip("#").removeprefix("https://").removeprefix("http://"), 2020)


def rules(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without annotations."""
    return {name: value for name, value in schema.items() if name in HONOURED}


def types_of(schema: dict[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema allows, by its ``type`` alone."""
    named = schema.get("type")
    if isinstance(named, list):
        return tuple(map(str, named))
    return (named,) if isinstance(named, str) else ALL_TYPES


def texts_of(schema: dict[str, Any], keyword: str) -> list[str]:
    """Return the texts in the list that a keyword has as its value."""
    value = schema.get(keyword)
    return [part for part in value if isinstance(part, str)] if isinstance(value, list) else []


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of the properties that a schema declares."""
    value = schema.get("properties")
    return value if isinstance(value, dict) else {}
