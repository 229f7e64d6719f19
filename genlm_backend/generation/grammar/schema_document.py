"""JSON schemas with all the schemas in them: checked, because llguidance passes over much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from difflib import get_close_matches
from typing import Any, final
from urllib.parse import unquote, urldefrag, urljoin

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.schema_formats import FORMATS, UNCHECKED
from genlm_backend.generation.grammar.schema_keywords import (
    ALL_TYPES,
    ANNOTATIONS,
    DEFINITIONS,
    HONOURED,
    draft_of,
    rules,
    types_of,
)
from genlm_backend.generation.grammar.schema_numbers import constants, is_number

Schema = dict[str, Any] | bool

_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")

_DEEPEST = 100


@final
class SchemaDocument:
    """A JSON schema, the schemas in it, and the schemas that it refers to."""

    def __init__(self, root: dict[str, Any]) -> None:
        """Find all schemas, and check their keywords."""
        self.root = root
        self._draft = draft_of(root.get("$schema"))
        self._pointers: dict[int, str] = {}
        self._bases: dict[int, str] = {}  # the URIs that references are relative to
        self._targets: dict[int, Schema] = {}
        self._named: dict[str, Schema] = {"": root}
        self._found: list[dict[str, Any]] = []
        self._find_all()
        self._check_loops()
        self._write_names()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over all schemas that are no booleans."""
        return iter(self._found)

    def pointer(self, schema: Schema) -> str:
        """Return where a schema is, as a JSON pointer behind ``#``."""
        return self._pointers.get(id(schema), "#")

    def target(self, schema: dict[str, Any]) -> Schema:
        """Return the schema that the ``$ref`` of a schema names."""
        return self._targets[id(schema)]

    def parts(self, schema: dict[str, Any]) -> Iterator[Schema]:
        """Yield the schemas that the values of a schema, or what is in them, are kept to."""
        yield from (part for _, part in _within(schema, tuple(HONOURED)))
        if "$ref" in schema:
            yield self.target(schema)

    def followed(self, schema: Schema) -> Schema:
        """Return a schema, or what it stands for where it only refers to another."""
        while isinstance(schema, dict) and rules(schema).keys() == {"$ref"}:
            schema = self.target(schema)
        return schema

    # ---------------------------------------------------------------- finding them

    def _find_all(self) -> None:
        self._find(self.root, "#", "")
        settled = 0
        while settled < len(self._found):  # what is referred to may refer to more
            for schema in self._found[settled:]:
                settled += 1
                if "$ref" in schema:
                    target, pointer, base = self._resolved(schema)
                    self._targets[id(schema)] = target
                    self._find(target, pointer, base)

    def _find(self, schema: Any, pointer: str, base: str) -> None:
        rest: list[tuple[Any, str, str, int]] = [(schema, pointer, base, 0)]
        while rest:
            one, pointer, base, depth = rest.pop()
            if not isinstance(one, dict) or id(one) in self._pointers:
                continue  # a boolean, or what llguidance says the fault of
            if depth > _DEEPEST:
                raise ConstraintError(f"the schema is nested more than {_DEEPEST} deep")
            base = self._named_base(one, base)
            self._pointers[id(one)], self._bases[id(one)] = pointer, base
            self._found.append(one)
            for keyword in one:
                self._check_keyword(keyword, one, pointer)
            self._check_neighbours(one, pointer)
            inner = _within(one, (*HONOURED, *DEFINITIONS))
            rest.extend((part, pointer + path, base, depth + 1) for path, part in inner)

    def _named_base(self, schema: dict[str, Any], base: str) -> str:
        """Note the names of a schema, and return the URI that its references are relative to."""
        if "$ref" in schema and self._draft <= 7:
            return base  # what stands beside it is passed over
        name = schema.get("id" if self._draft == 4 else "$id")
        if isinstance(name, str) and not name.startswith("#"):
            base = urldefrag(urljoin(base, name)).url
            self._named[base] = schema
        elif isinstance(name, str):
            self._named[base + name] = schema
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._named[f"{base}#{anchor}"] = schema
        return base

    def _resolved(self, schema: dict[str, Any]) -> tuple[Schema, str, str]:
        """Return the schema that another refers to, its pointer, and its base."""
        reference, pointer, base = schema["$ref"], self.pointer(schema), self._bases[id(schema)]
        if not isinstance(reference, str):
            raise ConstraintError(f"$ref at {pointer} must be a text, got {reference!r}")
        whole = base + reference if reference[:1] == "#" else urljoin(base, reference)
        uri, fragment = urldefrag(whole)
        start = self._named.get(f"{uri}#{fragment}") if fragment[:1] not in ("", "/") else None
        if start is not None:
            fragment = ""
        elif (start := self._named.get(uri)) is None or fragment[:1] not in ("", "/"):
            raise ConstraintError(
                f"$ref {reference!r} at {pointer} does not exist in the schema, and nothing is "
                "fetched: put what it names into '$defs', and refer to '#/$defs/…'"
            )
        target, base = _at(start, fragment), self._bases.get(id(start), base)
        if not isinstance(target, (dict, bool)):
            raise ConstraintError(
                f"$ref {reference!r} at {pointer} does not exist in the schema, or is no schema"
            )
        root = "" if start is self.root else self.pointer(start).removeprefix("#")
        return target, f"#{root}{fragment}", base

    def _write_names(self) -> None:
        """Write ``propertyNames`` as other keywords, where it is."""
        written = [schema for schema in self._found if "propertyNames" in schema]
        if written:  # in place; constants may be schemas too, by a reference
            for schema in self._found:
                schema.update(
                    {name: deepcopy(schema[name]) for name in ("const", "enum") if name in schema}
                )
        for schema in written:
            names = self.followed(schema["propertyNames"])
            types = types_of(names) if isinstance(names, dict) else ALL_TYPES
            keep_names(schema, names, types, self.pointer(schema))

    # ---------------------------------------------------------------- checking them

    def _check_keyword(self, keyword: str, schema: dict[str, Any], pointer: str) -> None:
        if keyword in ANNOTATIONS or keyword.startswith("x-"):
            return
        if keyword not in HONOURED:
            if is_idle(keyword, schema, types_of(schema), self._draft):
                return
            near = get_close_matches(keyword, [*HONOURED, *ANNOTATIONS], n=1, cutoff=0.8)
            hint = (
                f"did you mean {near[0]!r}?" if near else "annotations of your own begin with 'x-'"
            )
            if keyword == "uniqueItems":
                hint = "take a list in place of a set, and drop what comes twice afterwards"
            raise ConstraintError(
                f"no constraint keeps to the JSON schema's keyword {keyword!r}; {hint} "
                f"(at {pointer})"
            )
        if HONOURED[keyword].since > self._draft:
            raise ConstraintError(
                f"the draft that '$schema' names ({self.root['$schema']}) has no keyword "
                f"{keyword!r}, which is at {pointer}: name a later one, or none"
            )

    def _check_neighbours(self, schema: dict[str, Any], pointer: str) -> None:
        """Refuse keywords that another one beside them takes the meaning from."""
        beside = sorted(rules(schema).keys() - {"$ref"})
        if "$ref" in schema and beside and self._draft <= 7:
            raise ConstraintError(
                f"the draft that '$schema' names ({self.root['$schema']}) passes over "
                f"{beside[0]!r} beside $ref at {pointer}: put the $ref into an allOf, or name a "
                "later draft"
            )
        if isinstance(schema.get("items"), list) and "prefixItems" in schema:
            raise ConstraintError(
                f"a list of items beside prefixItems at {pointer}: use one of them"
            )

    def _check_loops(self) -> None:
        """Refuse schemas that refer to themselves before there is a part of a value."""
        done: set[int] = set()
        for schema in self._found:
            path, rest = {id(schema)}, [(schema, self._in_place(schema))]
            while rest and id(schema) not in done:
                one, parts = rest[-1]
                part = next(parts, None)
                if part is None:
                    rest.pop()
                    path.discard(id(one))
                    done.add(id(one))
                elif id(part) in path:
                    raise ConstraintError(f"the schema at {self.pointer(part)} refers to itself")
                elif id(part) not in done:
                    path.add(id(part))
                    rest.append((part, self._in_place(part)))

    def _in_place(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        parts = [part for _, part in _within(schema, _IN_PLACE)]
        if "$ref" in schema:
            parts.append(self.target(schema))
        return (part for part in parts if isinstance(part, dict))


def _within(schema: dict[str, Any], keywords: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in the values of some keywords, each with its JSON pointer."""
    for keyword in keywords:
        value = schema.get(keyword)
        kind = "map" if keyword in DEFINITIONS else HONOURED[keyword].schemas
        if kind == "map" and isinstance(value, dict):
            yield from ((f"/{keyword}/{_escaped(name)}", part) for name, part in value.items())
        elif "list" in kind and isinstance(value, list):
            yield from ((f"/{keyword}/{i}", part) for i, part in enumerate(value))
        elif "one" in kind and isinstance(value, (dict, bool)):
            yield f"/{keyword}", value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _at(value: Any, pointer: str) -> Any:
    """Return the part of a value that a JSON pointer names; ``None`` if there is none."""
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif (
            isinstance(value, list)
            and name.isascii()
            and name.isdecimal()
            and int(name) < len(value)
        ):
            value = value[int(name)]
        else:
            return None
    return value


def merges(schema: dict[str, Any]) -> bool:
    """Tell whether a value may be kept to several schemas by way of this one."""
    in_place = {"$ref", "allOf", "anyOf", "oneOf"} & schema.keys()
    return (
        "allOf" in schema
        or (bool(in_place) and len(rules(schema)) > 1)
        or bool(schema.get("patternProperties"))
    )


_OF_TYPES = {
    "uniqueItems": "array", "contains": "array", "minContains": "array", "maxContains": "array",
    "unevaluatedItems": "array", "dependentRequired": "object", "dependentSchemas": "object",
    "dependencies": "object", "unevaluatedProperties": "object",
}  # fmt: skip
"""Keywords that no constraint keeps to, and the type of values that each is about."""


def is_idle(keyword: str, schema: dict[str, Any], types: tuple[str, ...], draft: int) -> bool:
    """Tell whether a keyword that no constraint keeps to rules nothing out where it is."""
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


def keep_names(
    schema: dict[str, Any], names: dict[str, Any] | bool, types: tuple[str, ...], pointer: str
) -> None:
    """Write the ``propertyNames`` of a schema as other keywords, in place."""
    del schema["propertyNames"]
    found = _rules_of_strings(names)
    others = schema.get("additionalProperties", True)
    if names is False or "string" not in types:
        _declare(schema, (), others)
    elif (listed := constants(found)) is not None and found.keys() <= {"const", "enum"}:
        if schema.get("patternProperties"):
            raise _refused(pointer, "a list of names, beside patternProperties")
        _declare(schema, (name for name in listed if isinstance(name, str)), others)
    elif found:
        pattern = _pattern(found)
        if pattern is None:
            raise _refused(pointer, f"{_listed(found)} together")
        if schema.get("properties") or schema.get("patternProperties"):
            raise _refused(pointer, f"{_listed(found)}, beside properties or patternProperties")
        schema |= {"patternProperties": {pattern: others}, "additionalProperties": False}


def _rules_of_strings(names: dict[str, Any] | bool) -> dict[str, Any]:
    """Return the keywords of a schema that rule strings out."""
    if is_anything(names) or isinstance(names, bool):
        return {}
    return {
        name: value
        for name, value in names.items()
        if name in HONOURED
        and name != "type"
        and (not HONOURED[name].types or "string" in HONOURED[name].types)
        and not _fits_all(name, value)
    }


def _fits_all(keyword: str, value: Any) -> bool:
    """Tell whether all strings fit a keyword."""
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS and value not in UNCHECKED
    return (keyword, value) in (("minLength", 0), ("pattern", ""))


def _declare(schema: dict[str, Any], names: Iterable[str], others: Any) -> None:
    """Allow an object some keys alone, in the order in which they are declared, or listed."""
    declared, allowed = schema.get("properties") or {}, dict.fromkeys(names)
    ordered = [*(name for name in declared if name in allowed), *allowed]
    schema["properties"] = {name: declared.get(name, others) for name in ordered}
    schema["additionalProperties"] = False
    schema.pop("patternProperties", None)


def _pattern(found: dict[str, Any]) -> str | None:
    """Return a pattern of the strings that fit a format, a pattern or bounds of their length."""
    if found.keys() == {"pattern"} and isinstance(found["pattern"], str):
        return found["pattern"]
    if found.keys() == {"format"}:
        patterns = FORMATS.get(str(found["format"]), ())
        return f"^(?:{patterns[0]})$" if len(patterns) == 1 else None
    if found.keys() <= {"minLength", "maxLength"} and all(map(is_number, found.values())):
        least, most = int(found.get("minLength", 0)), found.get("maxLength")
        return rf"^[^\x00]{{{least},{'' if most is None else int(most)}}}$"
    return None


def _listed(found: dict[str, Any]) -> str:
    return ", ".join(map(repr, sorted(found)))


def _refused(pointer: str, fault: str) -> ConstraintError:
    return ConstraintError(
        f"no constraint keeps to propertyNames at {pointer} with {fault}: give names one 'enum', "
        "or one 'pattern', 'format' or bounds of their length in an object without other properties"
    )
