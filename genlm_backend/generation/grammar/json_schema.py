"""JSON schemas for llguidance: ``SchemaWalk`` rewrites a schema so that llguidance enforces it.

The walk refuses what llguidance ignores or misreads, such as numbers that no double equals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, product
from typing import Any, Final, TypeGuard, final
from urllib.parse import unquote

from genlm_backend.checks import near_names, shown
from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.grammar_library import (
    error_of,
    fault_of_generated,
    is_beginning,
)
from genlm_backend.generation.grammar.schema_classes import (
    check_is_no_instance,
    is_class_with_schema,
    schema_of_class,
)
from genlm_backend.generation.grammar.schema_patterns import FORMATS, NATIVE_FORMATS, portable

_IN_PLACE = ("allOf", "anyOf", "oneOf")
_LISTS: Final = {*_IN_PLACE, "prefixItems", "items"}
_MAPS: Final = {"properties", "patternProperties", "$defs", "definitions"}
_ONES: Final = {"items", "additionalItems", "additionalProperties"}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_KEYWORDS: Final = {
    *_LISTS, *_MAPS, *_ONES, *_LOWER, *_UPPER, "$anchor", "$ref", "const", "enum", "format",
    "maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties",
    "multipleOf", "pattern", "required", "type",
}  # fmt: skip
"""Supported keywords; those that llguidance misreads are rewritten or refused."""

_ANNOTATIONS: Final = {
    "$comment", "$id", "$schema", "default", "deprecated", "description", "discriminator",
    "example", "examples", "externalDocs", "id", "readOnly", "title", "writeOnly", "xml",
}  # fmt: skip
_ANNOTATING_FORMATS: Final = {
    "binary", "byte", "char", "decimal", "directory-path", "double", "file-path", "float", "int32",
    "int64", "password", "path",
}  # fmt: skip
"""Formats of OpenAPI and pydantic that are only annotations, so no text is checked against them."""

_HINTS: Final = {
    "propertyNames": "; declare the keys in 'properties', or use one 'patternProperties' and "
    '"additionalProperties": false',
    "uniqueItems": "; use a list instead of a set, and drop duplicates afterwards",
}
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_ENVELOPE: Final = frozenset({"name", "description", "strict", "schema"})
"""Entries of OpenAI's wrapper around a schema."""

_DEEPEST = 100
_MOST = 2**53
_MOST_EXPONENT = 22  # 10**22 is the largest power of ten that is an exact double
_MOST_FACTOR = 100_000  # a divisor n costs llguidance n states: 531,441 take 6 s
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_ESCAPES = 'nrbtf\\"'  # no "u": a declared key spelled with it would pass as an undeclared one


def check_schema(schema: Mapping[str, Any] | bool | str | type[Any]) -> SchemaWalk:
    """Check a JSON schema, given as a mapping, boolean, JSON text or class, and rewrite it."""
    if is_class_with_schema(schema):
        schema = schema_of_class(schema)
    check_is_no_instance(schema)
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        plain = json.loads(text, parse_float=_decimal, parse_constant=_decimal)
        json.dumps(plain, ensure_ascii=False, default=float).encode()  # lone surrogates fail
    except (TypeError, ValueError, RecursionError) as error:
        is_type = isinstance(schema, type) or hasattr(schema, "__origin__")
        hint = f"; pass pydantic.TypeAdapter({shown(schema)})" if is_type else ""
        raise ConstraintError(f"the schema is not JSON: {error}{hint}") from error
    if plain is False:
        raise ConstraintError("the schema is false, which no JSON value satisfies")
    if plain is not True and not isinstance(plain, dict):
        raise ConstraintError(f"a JSON schema must be an object or a boolean, got {plain!r}")
    return SchemaWalk({} if plain is True else plain)


def _decimal(text: str) -> Decimal:
    number = Decimal(text)
    if not number.is_finite() or abs(number.adjusted()) > 400:
        raise ValueError(f"{text} is not a finite number, or is out of range")
    return number


def unwrapped(schema: Any) -> Any:
    """Return the schema of a ``response_format``, taken out of OpenAI's wrapper if it has one."""
    if not isinstance(schema, Mapping) or {"schema", "name", "strict"}.isdisjoint(schema):
        return schema
    for name in schema.keys() - _ENVELOPE:
        known = ", ".join(map(repr, sorted(_ENVELOPE)))
        raise ConstraintError(f"{name!r} is not an entry of json_schema: the entries are {known}")
    if "schema" not in schema:
        raise ConstraintError(f"json_schema has no 'schema', only {', '.join(map(repr, schema))}")
    return schema["schema"]


@final
class SchemaWalk:
    """A JSON schema rewritten for llguidance, and its subschemas by JSON pointer."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._is_old = not re.search("2020-12|^$", str(root.get("$schema", "")))
        self._is_merging = False  # whether several schemas may apply to one value
        self._parts: dict[str, Any] = {}
        self._anchors: dict[str, str] = {}
        self._discriminators: dict[str, str] = {}
        self._root = self._written(root, "#")
        self._check_references()
        for pointer, part in self._schemas():
            if "oneOf" in part:
                self._write_one_of(part, pointer)
        self._check_merged_numbers()

    def grammar(self, whitespace: str) -> str:
        if is_beginning(_grammar({"properties": {"a": False}}, ""), '{"\\u'):
            self._refuse_escaped_keys()
        return _grammar(self._root, whitespace)

    def fault(self, whitespace: str, message: str) -> str:
        """Return llguidance's message and the pointer of the innermost schema with this fault."""
        fault = fault_of_generated(message)
        for pointer, part in reversed([*self._schemas()]):
            alone = _grammar(_without_references(part), whitespace)
            if fault_of_generated(error_of(alone)) == fault:
                return f"{fault} (at {pointer})"
        return f"{fault} (at #)"

    def _schemas(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((at, part) for at, part in self._parts.items() if isinstance(part, dict))

    # ---------------------------------------------------------------- the walk

    def _written(self, schema: Any, pointer: str, depth: int = 0) -> Any:
        """Rewrite a schema and its subschemas for llguidance; check every keyword."""
        self._parts[pointer] = schema
        if not isinstance(schema, dict):
            return schema  # a boolean, or an error that llguidance reports
        if depth > _DEEPEST:
            raise ConstraintError(f"the schema is nested more than {_DEEPEST} levels deep")
        written: dict[str, Any] = {}
        self._parts[pointer] = written
        for keyword, value in schema.items():
            place = f"{pointer}/{keyword}"
            if keyword in _MAPS and isinstance(value, dict):
                written[keyword] = {
                    name: self._written(part, f"{place}/{escaped}", depth + 1)
                    for name, part in value.items()
                    for escaped in [name.replace("~", "~0").replace("/", "~1")]
                }
            elif keyword in _LISTS and isinstance(value, list):
                written[keyword] = [
                    self._written(part, f"{place}/{i}", depth + 1) for i, part in enumerate(value)
                ]
            elif keyword in _ONES:
                written[keyword] = self._written(value, place, depth + 1)
            elif keyword in _KEYWORDS:
                written[keyword] = value
            else:
                self._check_annotation(keyword, value, pointer)
        self._check_neighbours(written, pointer)
        self._check_values(written, pointer)
        self._is_merging |= _merges(written)
        self._write_format(written, pointer)
        if isinstance(pattern := written.get("pattern"), str):
            written["pattern"] = portable(pattern, pointer)
        if patterns := _map(written, "patternProperties"):
            written["patternProperties"] = _written_patterns(written, patterns, pointer)
        return written

    def _check_annotation(self, keyword: str, value: Any, pointer: str) -> None:
        """Allow annotations; refuse other keywords, and ``$id`` below the root."""
        if keyword == "$id" and pointer != "#":
            raise ConstraintError(
                f"$id at {pointer} is not supported: leave it out, and refer to '#/$defs/…'"
            )
        if keyword == "discriminator" and isinstance(value, dict):
            self._discriminators[pointer] = str(value.get("propertyName"))
        is_idle = keyword in ("uniqueItems", "nullable") and value is False
        if keyword in _ANNOTATIONS or keyword.startswith("x-") or is_idle:
            return
        near = near_names(keyword, [*_KEYWORDS, *_ANNOTATIONS], quoted=True)
        hint = _HINTS.get(keyword, near or "; begin annotations of your own with 'x-'")
        raise ConstraintError(
            f"a constraint cannot enforce the JSON schema keyword {keyword!r}{hint} (at {pointer})"
        )

    def _check_neighbours(self, schema: dict[str, Any], pointer: str) -> None:
        """Refuse combinations of keywords that llguidance misreads or cannot enforce."""
        is_tuple = isinstance(schema.get("items"), list)
        if "prefixItems" in schema and (is_tuple or self._is_old):
            raise ConstraintError(
                f"prefixItems at {pointer} belongs to draft 2020-12: use it without a list as "
                "'items', and with the '$schema' of that draft or none"
            )
        if "additionalItems" in schema and not is_tuple:
            raise ConstraintError(
                f"additionalItems at {pointer} needs a list as 'items': use 'items' instead"
            )
        least, required = schema.get("minProperties"), _list(schema, "required")
        is_closed = schema.get("additionalProperties") is False and not schema.get(
            "patternProperties"
        )
        num_required = len(set(map(str, required)))
        if _is_number(least) and least > num_required + 1 and not is_closed:
            raise ConstraintError(
                f"a constraint cannot enforce minProperties {least} at {pointer}, as an undeclared "
                f"key may occur twice: with {num_required} required keys, the limit is "
                f"{num_required + 1}; name more keys in 'required', or forbid others with "
                '"additionalProperties": false'
            )

    def _check_values(self, schema: dict[str, Any], pointer: str) -> None:
        """Refuse numbers that llguidance misreads, and strings that it cannot generate."""
        for name in (*_LOWER, *_UPPER):
            if _is_number(bound := schema.get(name)) and not _is_exact(bound):
                raise ConstraintError(
                    f"a constraint cannot enforce {name} {bound} at {pointer} exactly, as "
                    "llguidance may round it: use a bound of fewer digits, below 2**53"
                )
        divisor = schema.get("multipleOf")
        if _is_number(divisor) and not _is_factor(divisor):
            raise ConstraintError(
                f"a constraint cannot enforce multipleOf {divisor} at {pointer}, as "
                "llguidance may round it or build too many states: use an integer from 1 to "
                f"{_MOST_FACTOR} or a fraction of few digits, such as 0.01; or leave it out, and "
                "round the generated number"
            )
        for value in [schema.get("const"), *_list(schema, "enum")]:
            for part in _scalars(value):
                is_short = not isinstance(part, Decimal) or "e" not in repr(float(part))
                if _is_number(part) and not (_is_exact(part) and is_short):
                    raise ConstraintError(
                        f"a constraint cannot enforce the number {part} at {pointer} exactly, as "
                        "llguidance may round it: use fewer digits, or a string"
                    )
                if isinstance(part, str) and _CONTROL.search(part):
                    raise ConstraintError(
                        f"the text {part!r} at {pointer} has a control character, which a "
                        "constraint cannot generate: leave it out"
                    )

    def _write_format(self, schema: dict[str, Any], pointer: str) -> None:
        """Write a format as a pattern if llguidance allows too much; refuse an unknown format."""
        value, types = schema.get("format"), schema.get("type", "string")
        name, known = str(value), {**FORMATS, **NATIVE_FORMATS}
        if value is None or known.get(name) == "":
            return
        if name not in ("email", "hostname"):
            del schema["format"]
        if "string" not in types or name in _ANNOTATING_FORMATS:
            return
        if name not in known:
            near = near_names(name, known, quoted=True).removeprefix("; ")
            raise ConstraintError(
                f"a constraint cannot enforce format {value!r} at {pointer}: write it as a "
                f"pattern; {near or 'the known formats are ' + ', '.join(known)}"
            )
        if "pattern" in schema:
            schema["allOf"] = [*_list(schema, "allOf"), {"pattern": known[name]}]
        else:
            schema["pattern"] = known[name]

    # ---------------------------------------------------------------- references

    def _check_references(self) -> None:
        """Refuse references out of the schema, and cycles that never reach a value."""
        schemas = [*self._schemas()]
        self._anchors = {f"#{part['$anchor']}": at for at, part in schemas if "$anchor" in part}
        graph: dict[str, list[str]] = {}
        for pointer, part in schemas:
            graph[pointer] = [
                f"{pointer}/{name}/{i}" for name in _IN_PLACE for i in range(len(_list(part, name)))
            ]
            if isinstance(reference := part.get("$ref"), str):
                graph[pointer].append(self._target(reference, pointer))
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            raise ConstraintError(
                f"the schema at {error.args[1][0]} refers to itself before a value begins"
            ) from error

    def _target(self, reference: str, pointer: str) -> str:
        target = self._anchors.get(reference, unquote(reference))
        if target not in self._parts:
            raise ConstraintError(
                f"$ref {reference!r} at {pointer} does not exist in the schema, and remote schemas "
                "are not fetched: put the schema into '$defs', and refer to '#/$defs/…'"
            )
        return target

    # ---------------------------------------------------------------- oneOf

    def _write_one_of(self, schema: dict[str, Any], pointer: str) -> None:
        """Rewrite ``oneOf`` as ``anyOf`` if no value fits two of its options; else refuse it."""
        options = schema["oneOf"]
        if not isinstance(options, list):
            return  # an error that llguidance reports
        names = dict.fromkeys(
            name for _, part in self._schemas() for name in _map(part, "properties")
        )
        key = self._discriminators.get(pointer)
        for name in [key] if key is not None else ["", *names]:
            tagged: list[dict[str, Any]] = []
            kinds = [self._kinds(option, name, tagged) for option in options]
            if all(_are_apart(one, other) for one, other in combinations(kinds, 2)):
                # Options are disjoint only if the distinguishing property is present: require it.
                for part in tagged:
                    part["required"] = [*dict.fromkeys([*_list(part, "required"), name])]
                either = {"anyOf": schema.pop("oneOf")}
                schema |= {"allOf": [*_list(schema, "allOf"), either]}
                return
        raise ConstraintError(
            f"the options of oneOf may overlap at {pointer}: give them different types or "
            "constants, or one property with a different constant in each; or use anyOf, if a "
            "value may fit several"
        )

    def _kinds(self, schema: Any, key: str, tagged: list[dict[str, Any]]) -> set[tuple[str, str]]:
        """Return the pairs (type, constant) that a schema allows; ``""`` is any constant.

        An object's constant is that of its property ``key``; ``tagged`` receives such schemas.
        """
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            schema = self._parts[self._target(schema["$ref"], "#")]
        if not isinstance(schema, dict):
            return set() if schema is False else {(kind, "") for kind in _TYPES}
        for options in (_list(schema, "anyOf"), _list(schema, "oneOf")):
            if options:
                return set().union(*(self._kinds(option, key, tagged) for option in options))
        if "const" in schema or _list(schema, "enum"):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return {_kind(value) for value in values}
        named = schema.get("type", _TYPES)
        named = [named] if isinstance(named, str) else named
        kinds = {"number" if kind == "integer" else str(kind) for kind in named}
        properties = _map(schema, "properties")
        if kinds == {"object"} and key in properties:
            tags = self._kinds(properties[key], "", [])
            if tags and all(tag for _, tag in tags):
                tagged.append(schema)
                return {("object", f"{kind} {tag}") for kind, tag in tags}
        return {(kind, "") for kind in kinds}

    # ---------------------------------------------------------------- checks of the whole schema

    def _check_merged_numbers(self) -> None:
        """Refuse combinations of bounds or divisors that llguidance does not enforce."""
        schemas = [*self._schemas()]
        divisors = {
            part["multipleOf"]: at for at, part in schemas if _is_number(part.get("multipleOf"))
        }
        if self._is_merging and len(divisors) > 1:
            raise ConstraintError(
                f"the multipleOf at {', '.join(divisors.values())} may apply to one number: put "
                "their least common multiple into one schema"
            )
        lows = [(at, *own) for at, part in schemas for own in _bounds(part, _LOWER)]
        highs = [(at, *own) for at, part in schemas for own in _bounds(part, _UPPER)]
        for (at, low, is_above), (other, high, is_below) in product(lows, highs):
            may_meet = self._is_merging or at == other
            if may_meet and (is_above or is_below) and 0 <= high - low < 1:
                raise ConstraintError(
                    f"a constraint cannot enforce an exclusive bound at an integer if the opposite "
                    f"bound is less than 1 away, as at {at} and {other}: use inclusive bounds, "
                    "such as a minimum of 0.001"
                )

    def _refuse_escaped_keys(self) -> None:
        """Refuse schemas whose keys llguidance < 1.8 does not enforce: it allows escaped keys."""
        for pointer, part in self._schemas():
            is_open = part.get("additionalProperties") is not False
            if part.get("patternProperties") or (is_open and part.get("properties")):
                raise ConstraintError(
                    f"the installed llguidance does not enforce the keys of the schema at "
                    f"{pointer}: install llguidance 1.8 or later, or declare all keys in "
                    "'properties', with \"additionalProperties\": false"
                )


def _written_patterns(
    schema: dict[str, Any], patterns: dict[str, Any], pointer: str
) -> dict[str, Any]:
    """Rewrite patterns of keys so that no key evades them in another regex dialect."""
    others = schema.get("additionalProperties", True)
    others = True if others == {} else others
    declared = map(str, [*_map(schema, "properties"), *_list(schema, "required")])
    is_odd = not all(name.isascii() and name.isprintable() for name in declared)
    written: dict[str, Any] = {}
    for pattern, part in patterns.items():
        narrow, wide = portable(pattern, pointer), portable(pattern, pointer, is_wide=True)
        is_refused = is_odd or others not in (True, False) or "\\n?$" in wide[:-4]
        if narrow != wide and (is_refused or (others is False and len(patterns) > 1)):
            raise ConstraintError(
                f"the pattern {shown(pattern)} of keys at {pointer} differs between regex "
                'dialects, so other keys may pass: make it the only one, with "additional'
                'Properties": false, or write it without $, dots and classes such as \\d'
            )
        written[wide if others is True else narrow] = part
    if len(written) < len(patterns):
        raise ConstraintError(f"two of the patterns of keys at {pointer} may match the same key")
    return written


def _grammar(schema: Any, whitespace: str) -> str:
    spaces = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    whole = schema if isinstance(schema, dict) else {"anyOf": [schema]}
    options = {**spaces, "json_allowed_escapes": _ESCAPES}
    return "start: %json " + json.dumps({**whole, "x-guidance": options}, default=float)


def _without_references(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_references(part) for name, part in value.items() if name != "$ref"}
    return [_without_references(part) for part in value] if isinstance(value, list) else value


def _map(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the numbers, strings, booleans, nulls and keys in a constant."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _scalars(part)
    elif isinstance(value, list):
        for part in value:
            yield from _scalars(part)
    else:
        yield value


def _kind(value: Any) -> tuple[str, str]:
    """Return a constant's type and JSON text; ``""`` if equal constants may have several texts."""
    if isinstance(value, (dict, list)):
        return ("object" if isinstance(value, dict) else "array"), ""
    if _is_number(value):
        return "number", str(value) if isinstance(value, int) else ""
    names = {str: "string", bool: "boolean"}
    return names.get(type(value), "null"), json.dumps(value)


def _are_apart(one: set[tuple[str, str]], other: set[tuple[str, str]]) -> bool:
    return not any(
        kind == other_kind and (not tag or not other_tag or tag == other_tag)
        for kind, tag in one
        for other_kind, other_tag in other
    )


def _merges(schema: dict[str, Any]) -> bool:
    """Return whether a schema may apply several schemas to one value."""
    is_in_place = bool({"$ref", *_IN_PLACE} & schema.keys())
    num_rules = len(schema.keys() - {"$anchor", "$defs", "definitions"})
    return "allOf" in schema or (is_in_place and num_rules > 1) or "patternProperties" in schema


# -------------------------------------------------------------------- numbers


def _is_number(value: Any) -> TypeGuard[int | Decimal]:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def _is_exact(number: int | Decimal) -> bool:
    """Return whether llguidance reads a number exactly."""
    # llguidance rounds once for the digits and once for the exponent: both must be exact doubles.
    exact = Decimal(number)
    _, digits, exponent = exact.normalize().as_tuple()
    largest = max(int("".join(map(str, digits))), abs(number))
    is_small = largest < _MOST and abs(int(exponent)) <= _MOST_EXPONENT
    return is_small and Decimal(repr(float(number))) == exact


def _is_factor(divisor: int | Decimal) -> bool:
    """Return whether llguidance enforces a ``multipleOf``, which it scales to an integer first."""
    if divisor <= 0 or not _is_exact(divisor):
        return False
    value, exponent = float(divisor), 0
    while value % 1 and value <= _MOST_FACTOR:
        value, exponent = value * 10, exponent + 1
    is_same = value % 1 == 0 and Decimal(int(value)).scaleb(-exponent) == divisor
    return is_same and value <= _MOST_FACTOR


def _bounds(schema: dict[str, Any], names: tuple[str, str]) -> list[tuple[int | Decimal, bool]]:
    """Return a schema's lower or upper bounds, and for each whether it is an excluded integer."""
    if schema.get("type") == "integer":
        return []
    bound, excluded = (schema.get(name) for name in names)
    found = [(bound, excluded is True and bound % 1 == 0)] if _is_number(bound) else []
    return [*found, (excluded, excluded % 1 == 0)] if _is_number(excluded) else found
