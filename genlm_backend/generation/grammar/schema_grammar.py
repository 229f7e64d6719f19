"""JSON schemas as grammars: llguidance's own where it keeps to them, and rules elsewhere.

llguidance reads all numbers into doubles, so that a schema with a number that no double holds, or
with a constant that can only be written with ``\\u``, is not for it. The rules go down to where
these are; what is beside the way is llguidance's again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, final

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.grammar_library import (
    error_of,
    fault_of_generated,
    is_beginning,
)
from genlm_backend.generation.grammar.schema_document import Schema, SchemaDocument
from genlm_backend.generation.grammar.schema_keywords import (
    HONOURED,
    properties_of,
    rules,
    texts_of,
    types_of,
)
from genlm_backend.generation.grammar.schema_leaves import Leaves
from genlm_backend.generation.grammar.schema_numbers import (
    constants,
    inexact_bounds,
    integer_bounds,
    integers_within,
    is_plain,
    scalar_texts,
    type_of,
)

_IN_LARK = {"/": "\\/", "\n": "\\n"}
_CHARACTER = r'[^"\\\x00-\x1f\x7f]|\\["\\bfnrt]'

# Schemas, each with a beginning of a text that it forbids.
_ESCAPED = (({"properties": {"a": False}}, '{"\\u'), ({"properties": {"a": False}}, '{"\\/'))
_FORGOTTEN = (
    ({"additionalProperties": False, "allOf": [{"patternProperties": {"^b": {}}}]}, '{"b'),
    ({"properties": {"b": {"type": "null"}}, "patternProperties": {"b": {"const": 1}}}, '{"b":'),
)


def schema_grammar(document: SchemaDocument, whitespace: str) -> str:
    """Return the grammar of a schema, in Lark's syntax."""
    _check_keys(document)
    leaves, needing = Leaves(document, whitespace), _needing_rules(document)
    if id(document.root) not in needing:
        return f"start: {leaves.grammar(document.root)}"
    return _Rules(document, leaves, needing, whitespace).grammar()


def fault_of_schema(document: SchemaDocument, whitespace: str, message: str) -> str:
    """Return llguidance's message about the grammar of a schema, with the place of the fault.

    It is that of the innermost schema whose own grammar it says the same of.
    """
    leaves, fault = Leaves(document, whitespace), fault_of_generated(message)
    pointer, seen = "#", set[int]()
    schema: Schema | None = document.root
    while isinstance(schema, dict):
        pointer = document.pointer(schema)
        seen.add(id(schema))
        inner = map(document.followed, document.parts(schema))
        unseen = (part for part in inner if isinstance(part, dict) and id(part) not in seen)
        schema = next((part for part in unseen if _has(part, leaves, fault)), None)
    return f"{fault} (at {pointer})"


def _has(schema: Schema, leaves: Leaves, fault: str) -> bool:
    """Tell whether llguidance finds a fault in a schema by itself."""
    return fault_of_generated(error_of(f"start: {leaves.grammar(schema)}")) == fault


def _check_keys(document: SchemaDocument) -> None:
    """Refuse objects whose keys the installed release of llguidance does not keep to.

    Before 1.8, a key that is not declared may have any escape, and so spell one that is; the first
    releases of 1.7 forget patterns of keys where they merge schemas.
    """
    for schema in document:
        has_patterns = bool(schema.get("patternProperties"))
        is_open = schema.get("additionalProperties") is not False
        if has_patterns or (is_open and schema.get("properties")):
            wrong = _FORGOTTEN if has_patterns else ()
            wrong += _ESCAPED if is_open else ()
            if any(is_beginning(_probe(probe), text) for probe, text in wrong):
                raise ConstraintError(
                    f"the installed llguidance does not keep to the keys of the schema at "
                    f"{document.pointer(schema)}: install llguidance 1.8 or later, or declare all "
                    "keys in 'properties', with \"additionalProperties\": false"
                )


def _probe(schema: dict[str, Any]) -> str:
    return f"start: {Leaves(SchemaDocument(schema), '').grammar(schema)}"


def _needing_rules(document: SchemaDocument) -> set[int]:
    """Return the ids of the schemas that llguidance does not keep to."""
    users: dict[int, list[int]] = {}
    rest = []
    for schema in document:
        for part in document.parts(schema):
            users.setdefault(id(part), []).append(id(schema))
        if inexact_bounds(schema) or not all(map(is_plain, constants(schema) or ())):
            rest.append(id(schema))
    needing: set[int] = set()
    while rest:
        one = rest.pop()
        if one not in needing:
            needing.add(one)
            rest.extend(users.get(one, ()))
    return needing


@final
class _Rules:
    """Rules of a schema, made one after another; each is named when it is first needed."""

    def __init__(
        self, document: SchemaDocument, leaves: Leaves, needing: set[int], whitespace: str
    ) -> None:
        self._document = document
        self._leaves = leaves
        self._needing = needing
        self._lines: list[str] = []
        self._names: dict[int | str, str] = {}
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._space = "SPACE?" if whitespace else ""
        if whitespace:
            self._lines.append(f"SPACE: {_regex(whitespace)} & /(?s:.+)/")

    def grammar(self) -> str:
        start = self._rule(self._document.root)
        while self._waiting:
            name, schema = self._waiting.pop()
            options = list(self._options(schema))
            if not options:
                raise self._refused(schema, "there is no value that fits")
            self._lines.append(f"{name}: {' | '.join(options)}")
        return "\n".join([f"start: {start}", *self._lines])

    def _rule(self, schema: Schema) -> str:
        """Return the name of the rule of a schema."""
        schema = self._document.followed(schema)
        if id(schema) not in self._needing or isinstance(schema, bool):
            return self._named(self._leaves.grammar(schema))
        if id(schema) not in self._names:
            self._names[id(schema)] = f"rule_{len(self._names)}"
            self._waiting.append((self._names[id(schema)], schema))
        return self._names[id(schema)]

    def _named(self, body: str, kind: str = "rule") -> str:
        """Return the name of a rule, or of a terminal, with a body."""
        if body not in self._names:
            self._names[body] = f"{kind}_{len(self._names)}"
            self._lines.append(f"{self._names[body]}: {body}")
        return self._names[body]

    # ---------------------------------------------------------------- schemas

    def _options(self, schema: dict[str, Any]) -> Iterator[str]:
        """Yield the alternatives of the rule of a schema."""
        found = rules(schema)
        if (listed := constants(schema)) is not None:
            self._allow_only(schema, {"const", "enum", "type"})
            yield from self._constants(listed, types_of(schema))
        elif found.keys() & {"allOf", "anyOf", "oneOf"}:
            yield from self._combination(schema)
        else:
            self._allow_only(schema, {name for name in HONOURED if name != "$ref"})
            for kind in types_of(schema):
                yield self._of_type(schema, kind)

    def _allow_only(self, schema: dict[str, Any], allowed: Iterable[str]) -> None:
        if beside := sorted(rules(schema).keys() - set(allowed)):
            raise self._refused(schema, f"{beside[0]!r} cannot be kept to beside that")

    def _refused(self, schema: dict[str, Any], fault: str) -> ConstraintError:
        return ConstraintError(
            f"the schema at {self._document.pointer(schema)} has numbers of more than 53 bits or "
            f"characters without a short escape, and {fault}: write it as one 'enum', 'const' or "
            "integer with bounds, or as an object, array or anyOf of these"
        )

    def _constants(self, values: list[Any], types: tuple[str, ...]) -> Iterator[str]:
        known = {"number", "integer"}.intersection
        fitting = [
            value
            for value in values
            if (kind := type_of(value)) in types or (known({kind}) and "number" in types)
        ]
        scalars = [value for value in fitting if not isinstance(value, (list, dict))]
        if scalars:
            texts = {text: None for value in scalars for text in scalar_texts(value)}
            yield self._named(" | ".join(map(_quoted, texts)), "TEXT")
        for value in fitting:
            if isinstance(value, (list, dict)):
                yield self._constant(value)

    def _constant(self, value: Any) -> str:
        if isinstance(value, list):
            parts = [self._constant(part) for part in value]
            return self._named(self._between("[", self._separated(parts), "]"))
        if isinstance(value, dict):
            pairs = [self._pair(_quoted_key(key), self._constant(value[key])) for key in value]
            return self._named(self._between("{", self._separated(pairs), "}"))
        return self._named(" | ".join(map(_quoted, scalar_texts(value))), "TEXT")

    def _combination(self, schema: dict[str, Any]) -> Iterator[str]:
        (keyword, *_) = rules(schema).keys() & {"allOf", "anyOf", "oneOf"}
        self._allow_only(schema, {keyword})
        parts = schema[keyword]
        if not isinstance(parts, list) or (keyword == "allOf" and len(parts) != 1):
            raise self._refused(schema, f"{keyword!r} cannot be kept to there")
        if keyword == "oneOf" and self._leaves.exclusive(schema) is not parts:
            raise self._refused(schema, "options of oneOf are not known to be apart")
        yield from (self._rule(part) for part in parts if part is not False)

    def _of_type(self, schema: dict[str, Any], kind: str) -> str:
        """Return the rule of the values of one type that fit a schema."""
        numeric = "number" if kind == "integer" else kind
        found = {
            name: value for name, value in rules(schema).items() if numeric in HONOURED[name].types
        }
        parts = (part for part in self._document.parts(found) if id(part) in self._needing)
        if kind == "integer" and inexact_bounds(found):
            pattern = integers_within(*integer_bounds(found))
            if not pattern:
                raise self._refused(schema, "there is no integer within the bounds")
            return self._named(f"/{pattern}/", "INTEGER")
        if next(parts, None) is None:
            return self._named(self._leaves.grammar({**found, "type": kind}))
        return self._object(schema) if kind == "object" else self._array(schema)

    # ---------------------------------------------------------------- objects and arrays

    def _object(self, schema: dict[str, Any]) -> str:
        for keyword in ("patternProperties", "minProperties", "maxProperties"):
            if keyword in schema:
                raise self._refused(schema, f"{keyword!r} cannot be kept to there")
        required = dict.fromkeys(texts_of(schema, "required"))
        others = schema.get("additionalProperties", True)
        declared = {**dict.fromkeys(required, others), **properties_of(schema)}
        forbidden = [name for name, part in declared.items() if part is False]
        if required.keys() & forbidden:
            raise self._refused(schema, "a property is required and forbidden")
        following = leading = ""
        if others is not False:
            pair = self._pair(self._free_key(declared), self._rule(others))
            following = self._named(f"({self._comma} {pair})*")
            leading = self._named(f"({pair} {following})?")
        ordered = [name for name in (*properties_of(schema), *required) if name not in forbidden]
        for name in reversed(dict.fromkeys(ordered)):
            pair = self._pair(_quoted_key(name), self._rule(declared[name]))
            if name in required:
                leading = self._named(f"{pair} {following}")
                following = self._named(f"{self._comma} {pair} {following}")
            else:
                leading = self._named(f"{pair} {following} | {leading}")
                following = self._named(f"({self._comma} {pair})? {following}")
        return self._named(self._between("{", leading, "}"))

    def _free_key(self, declared: Iterable[str]) -> str:
        """Return the terminal of the keys that are not declared; each has one spelling."""
        string = f'/"({_CHARACTER})*"/'
        names = " | ".join(map(_quoted_key, declared))
        return self._named(f"{string} & ~({names})" if names else string, "KEY")

    def _array(self, schema: dict[str, Any]) -> str:
        first, others = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(others, list):
            first, others = others, schema.get("additionalItems", True)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        most = None if most is None else int(most)
        if others is False or (most is not None and most < len(first)):
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            raise self._refused(schema, "minItems is above the number of items there may be")
        first = first[:most]
        tail = self._tail(others, len(first), least, most)
        for i in reversed(range(len(first))):
            comma = f"{self._comma} " if i else ""
            item = f"{comma}{self._rule(first[i])} {tail}"
            tail = self._named(item if i < least else f"({item})?")
        return self._named(self._between("[", tail, "]"))

    def _tail(self, others: Schema, num_first: int, least: int, most: int | None) -> str:
        """Return the rule of the items behind those that have a place."""
        low, high = max(0, least - num_first), None if most is None else most - num_first
        if high == 0:
            return ""
        item = self._rule(others)
        more = f"({self._comma} {item})"
        if num_first:
            return self._named(f"{more}{_times(low, high)}")
        rest = f"{item} {more}{_times(max(0, low - 1), None if high is None else high - 1)}"
        rest = item if high == 1 else rest
        return self._named(rest if low else f"({rest})?")

    @property
    def _comma(self) -> str:
        return f'{self._space} "," {self._space}'

    def _separated(self, parts: list[str]) -> str:
        return f" {self._comma} ".join(parts)

    def _between(self, opening: str, inner: str, closing: str) -> str:
        space = self._space if inner else ""
        return f'"{opening}" {self._space} {inner} {space} "{closing}"'

    def _pair(self, key: str, value: str) -> str:
        return f'{key} {self._space} ":" {self._space} {value}'


def _times(low: int, high: int | None) -> str:
    return "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"


def _quoted(text: str) -> str:
    """Return a text as a string of Lark, which takes no DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _quoted_key(name: str) -> str:
    """Return a key as JSON has it, as a string of Lark."""
    return _quoted(json.dumps(name, ensure_ascii=False))


def _regex(pattern: str) -> str:
    """Return a pattern as Lark has it."""
    written = re.sub(r"\\.|[/\n]", lambda found: _IN_LARK.get(found[0], found[0]), pattern)
    return f"/{written}/"
