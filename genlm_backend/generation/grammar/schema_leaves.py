"""Schemas that llguidance keeps to, as it gets them within a grammar."""

from __future__ import annotations

import json
import re
from typing import Any, final

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.schema_document import Schema, SchemaDocument, types_of
from genlm_backend.generation.grammar.schema_formats import FORMATS
from genlm_backend.generation.grammar.schema_idle import is_anything
from genlm_backend.generation.grammar.schema_keywords import HONOURED, SIZES
from genlm_backend.generation.grammar.schema_literals import doubles
from genlm_backend.generation.grammar.schema_numbers import divisors, factor_of, is_number
from genlm_backend.generation.grammar.schema_options import Options
from genlm_backend.generation.grammar.schema_patterns import before_line_break, has_end, portable
from genlm_backend.generation.grammar.schema_values import (
    BOUNDS,
    excluded_integers,
    merges,
    shorter_numbers,
)

_NAME = re.compile("[^0-9A-Za-z_]+")
_ESCAPES = 'nrbtf\\"'
"""Letters behind a backslash in strings: each character has one spelling.

With ``u`` a key could be spelled in several ways, and be taken for one that is not declared.
"""


@final
class Leaves:
    """Schemas as grammars of llguidance's, each complete with what it refers to."""

    def __init__(self, document: SchemaDocument, whitespace: str) -> None:
        self._document = document
        self.exclusive = Options(document).exclusive
        spaces = (
            {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
        )
        self._are_merged = any(map(merges, document))
        self._options = {**spaces, "json_allowed_escapes": _ESCAPES}

    def grammar(self, schema: Schema) -> str:
        """Return what a rule can consist of: ``%json`` and a schema."""
        names: dict[int, str] = {}
        waiting: list[tuple[str, Schema]] = []
        whole = self._written(schema, names, waiting)
        definitions = {}
        while waiting:
            name, target = waiting.pop()
            definitions[name] = self._written(target, names, waiting)
        parts = {"anyOf": [whole]} if isinstance(whole, bool) else whole
        if definitions:
            parts = {**parts, "$defs": definitions}
        return "%json " + json.dumps({**parts, "x-guidance": self._options})

    def _written(
        self, schema: Any, names: dict[int, str], waiting: list[tuple[str, Schema]]
    ) -> Any:
        if not isinstance(schema, dict):
            return schema
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword not in HONOURED or keyword == "format":
                continue
            if keyword == "additionalItems" and not isinstance(schema.get("items"), list):
                continue  # it counts only there, and would take prefixItems away
            if keyword == "$ref":
                found[keyword] = self._reference(schema, names, waiting)
                continue
            kind = HONOURED[keyword].schemas
            if kind == "map" and isinstance(value, dict):
                written = {
                    name: self._written(part, names, waiting) for name, part in value.items()
                }
                parts: Any = written
                if keyword == "patternProperties":
                    others = schema.get("additionalProperties", True)
                    others = is_anything(others) or self._written(others, names, waiting)
                    parts = _with_patterns(written, others, self._document.place(schema))
            elif "list" in kind and isinstance(value, list):
                listed = self.exclusive(schema) if keyword == "oneOf" else value
                parts = [self._written(part, names, waiting) for part in listed]
            elif kind:
                parts = self._written(value, names, waiting)
            elif keyword == "pattern" and isinstance(value, str):
                parts = portable(value, "")
            else:
                parts = int(value) if keyword in SIZES else doubles(value)
            found[keyword] = parts
        if isinstance(found.get("oneOf"), list):  # which are anyOf, as they are apart
            _add_options(found, found.pop("oneOf"))
        _divide(found, schema)
        for name, bound in excluded_integers(schema, self._are_merged).items():
            found.pop("exclusiveM" + name[1:])
            found[name] = float(bound)
        bounds = {name: found[name] for name in BOUNDS if name in found}
        if shorter := shorter_numbers(schema, bounds):
            found = {name: value for name, value in found.items() if name not in bounds}
            _add_options(found, [bounds, {"type": "number", "enum": shorter}])
        return _with_format(found, schema.get("format"))

    def _reference(
        self, schema: dict[str, Any], names: dict[int, str], waiting: list[tuple[str, Schema]]
    ) -> str:
        target = self._document.target(schema)
        if isinstance(target, bool):
            name = "anything" if target else "nothing"
            waiting.append((name, target))
            return f"#/$defs/{name}"
        if id(target) not in names:
            last = self._document.place(target).rpartition("/")[2]
            names[id(target)] = f"{_NAME.sub('', last)}_{len(names)}"
            waiting.append((names[id(target)], target))
        return f"#/$defs/{names[id(target)]}"


def _add_options(schema: dict[str, Any], options: list[Any]) -> None:
    """Keep a schema to one of several more, which may be beside others."""
    either = {"anyOf": options}
    schema |= {"allOf": [*schema.get("allOf", ()), either]} if "anyOf" in schema else either


def _divide(schema: dict[str, Any], given: dict[str, Any]) -> None:
    """Write a ``multipleOf`` as one for each number of digits behind the point."""
    divisor = given.get("multipleOf")
    factor = factor_of(divisor) if is_number(divisor) else None
    if factor is None or "number" not in types_of(given):
        return
    first, *others = map(float, divisors(*factor))
    if others:
        del schema["multipleOf"]
        less = [{"type": "number", "multipleOf": other} for other in others]
        _add_options(schema, [{"multipleOf": first}, *less])


def _with_patterns(written: dict[str, Any], others: Any, place: str) -> dict[str, Any]:
    """Return schemas by patterns of keys, such that no key escapes them by another reading.

    Args:
        written: The schemas by their patterns, as llguidance gets them.
        others: The schema of the other keys, as it gets it.
        place: The place of the schema.

    Raises:
        ConstraintError: (``ValueError``) If two of the patterns are written alike.
    """
    found: list[tuple[str, Any]] = []
    for name, part in written.items():
        if others is True:  # more keys are kept to it, and none need be
            found.append((portable(name, place, dot=".", end=r"\n?$"), part))
            continue
        found.append((portable(name, place), part))
        # Some keys match by Python alone: they are kept to both, and to no other pattern.
        if has_end(name) and (others is not False or len(written) > 1):
            both = [one for one in (part, others) if one is not True]
            schema = both[0] if len(both) == 1 else {"allOf": both}
            found.append(
                (
                    portable(before_line_break(name), place),
                    False if False in both else schema,
                )
            )
    if len(dict(found)) < len(found):
        raise ConstraintError(
            f"two of the patterns of keys at {place} may match the same key: {', '.join(written)}"
        )
    return dict(found)


def _with_format(schema: dict[str, Any], name: Any) -> dict[str, Any]:
    """Return a schema with a format as patterns, each of which matches the whole string."""
    if not isinstance(name, str) or name not in FORMATS:
        return schema  # no string is meant, or the format would have been refused
    patterns = [{"pattern": f"^(?:{pattern})$"} for pattern in FORMATS[name]]
    if len(patterns) == 1 and "pattern" not in schema:
        return {**schema, **patterns[0]}
    return {**schema, "allOf": [*schema.get("allOf", ()), *patterns]}
