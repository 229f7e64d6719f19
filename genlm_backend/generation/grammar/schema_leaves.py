"""Schemas that llguidance keeps to, as it gets them in a grammar; options that are apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations
from typing import Any, final

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.schema_document import (
    Schema,
    SchemaDocument,
    is_anything,
    merges,
)
from genlm_backend.generation.grammar.schema_formats import FORMATS
from genlm_backend.generation.grammar.schema_keywords import (
    ALL_TYPES,
    HONOURED,
    SIZES,
    properties_of,
    rules,
    texts_of,
    types_of,
)
from genlm_backend.generation.grammar.schema_numbers import (
    BOUNDS,
    bound_of,
    constants,
    divisors,
    doubles,
    excluded_integers,
    factor_of,
    is_number,
    key_of,
    shorter_numbers,
    type_of,
)
from genlm_backend.generation.grammar.schema_patterns import before_line_break, has_end, portable

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
        """Return the body of a rule: ``%json`` and a schema."""
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
                    parts = _with_patterns(written, others, self._document.pointer(schema))
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
            last = self._document.pointer(target).rpartition("/")[2]
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


def _with_patterns(written: dict[str, Any], others: Any, pointer: str) -> dict[str, Any]:
    """Return schemas by patterns of keys, such that no key escapes them by another reading."""
    found: list[tuple[str, Any]] = []
    for name, part in written.items():
        if others is True:  # more keys are kept to it, and none need be
            found.append((portable(name, pointer, dot=".", end=r"\n?$"), part))
            continue
        found.append((portable(name, pointer), part))
        # Some keys match by Python alone: they are kept to both, and to no other pattern.
        if has_end(name) and (others is not False or len(written) > 1):
            both = [one for one in (part, others) if one is not True]
            schema = both[0] if len(both) == 1 else {"allOf": both}
            found.append(
                (
                    portable(before_line_break(name), pointer),
                    False if False in both else schema,
                )
            )
    if len(dict(found)) < len(found):
        raise ConstraintError(
            f"two of the patterns of keys at {pointer} may match the same key: {', '.join(written)}"
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


_DEEPEST = 8


@final
class Options:
    """The options of the ``oneOf`` in a schema."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._known: dict[tuple[int, int], bool] = {}
        self._written: list[Schema] = []  # kept, as what is known goes by their ids

    def exclusive(self, schema: dict[str, Any]) -> list[Schema]:
        """Return options of which a value fits one at most, in the place of those of ``oneOf``.

        They are the same where no value fits two of these. Where none would that has a certain
        key, as that of pydantic's discriminated unions with a default, the key is required.
        """
        options = schema["oneOf"]
        pairs = list(combinations(options, 2))
        if all(self.are_apart(one, other) for one, other in pairs):
            return options
        for key in self._keys(options[0]):
            written = [self._with_key(option, key) for option in options]
            found = [option for option in written if option is not None]
            self._written += found
            if len(found) == len(options) and all(self._differ(*pair, key) for pair in pairs):
                return found
        raise ConstraintError(
            f"options of oneOf are not known to be apart at {self._document.pointer(schema)}: give "
            "them different types, constants or ranges, or a required property that differs so; "
            "or write anyOf, if a value may fit several"
        )

    def are_apart(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Tell whether no value is known to fit two schemas."""
        if not isinstance(one, dict) or not isinstance(other, dict):
            return one is False or other is False
        if depth > _DEEPEST:
            return False
        pair = (id(one), id(other))
        if pair not in self._known:
            self._known[pair] = False  # until it is known better, if they refer to themselves
            self._known[pair] = self._compared(one, other, depth)
        return self._known[pair]

    def _compared(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        if _differ_in_values(one, other) or self._differ_in_keys(one, other, depth):
            return True
        for first, second in ((one, other), (other, one)):
            if any(self.are_apart(part, second, depth + 1) for part in self._conjuncts(first)):
                return True
            for keyword in ("anyOf", "oneOf"):
                listed = first.get(keyword)
                if isinstance(listed, list) and all(
                    self.are_apart(part, second, depth + 1) for part in listed
                ):
                    return True
        return False

    def _conjuncts(self, schema: dict[str, Any]) -> Iterator[Schema]:
        """Yield other schemas that every value of a schema fits."""
        if "$ref" in schema:
            yield self._document.target(schema)
        if isinstance(listed := schema.get("allOf"), list):
            yield from listed

    def _differ_in_keys(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Tell whether two schemas of objects have a key whose values are apart."""
        if _kinds(one) & _kinds(other) != {"object"}:
            return False
        return any(
            self.are_apart(
                properties_of(one).get(name, True), properties_of(other).get(name, True), depth + 1
            )
            for name in sorted({*texts_of(one, "required"), *texts_of(other, "required")})
        )

    # ---------------------------------------------------------------- a key that tells them apart

    def _keys(self, option: Schema) -> list[str]:
        """Return the keys that an option declares, or the first one of its own options."""
        option = self._document.followed(option)
        inner = option.get("oneOf") if isinstance(option, dict) else None
        if isinstance(inner, list) and inner:
            return self._keys(inner[0])
        return list(properties_of(option)) if isinstance(option, dict) else []

    def _with_key(self, option: Schema, key: str) -> Schema | None:
        """Return an option of objects that must have a key; ``None`` if it is something else."""
        option = self._document.followed(option)
        if not isinstance(option, dict):
            return None
        inner = option.get("oneOf")
        if isinstance(inner, list) and rules(option).keys() == {"oneOf"}:
            written = [self._with_key(part, key) for part in inner]
            return None if None in written else {"oneOf": written}
        if "$ref" in option or "object" not in types_of(option) or key not in properties_of(option):
            return None
        return {**option, "required": list(dict.fromkeys([*texts_of(option, "required"), key]))}

    def _differ(self, one: Schema, other: Schema, key: str) -> bool:
        """Tell whether no value that has a key is known to fit two options."""
        first, second = self._with_key(one, key), self._with_key(other, key)
        return Options(self._document).are_apart(first or False, second or False)


def _differ_in_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether no value fits two schemas by their types, constants and bounds."""
    kinds = _kinds(one) & _kinds(other)
    if not kinds:
        return True
    first, second = constants(one), constants(other)
    if first is not None and second is not None:
        return not set(map(key_of, first)) & set(map(key_of, second))
    if kinds != {"number"}:
        return False
    return _is_below(one, other) or _is_below(other, one)


def _is_below(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether the numbers of a schema are all less than those of another."""
    high, low = _bound(one, "aximum"), _bound(other, "inimum")
    return high is not None and low is not None and high < low


def _bound(schema: dict[str, Any], end: str) -> int | Decimal | None:
    """Return a bound of a schema, which is included or not."""
    if (listed := constants(schema)) is None:
        return bound_of(schema, end)[0]
    numbers = filter(is_number, listed)
    return (max if end == "aximum" else min)(numbers, default=None)


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema allows, with integers among the numbers."""
    values = constants(schema)
    found = types_of(schema) if values is None else tuple(map(type_of, values))
    return {"number" if kind == "integer" else kind for kind in found} & set(ALL_TYPES)
