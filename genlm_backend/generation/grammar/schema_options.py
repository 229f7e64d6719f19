"""Options of ``oneOf``: which of them no value fits at once, and how they are written then."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations
from typing import Any, final

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.schema_document import (
    Schema,
    SchemaDocument,
    properties_of,
    rules,
    texts_of,
    types_of,
)
from genlm_backend.generation.grammar.schema_keywords import ALL_TYPES
from genlm_backend.generation.grammar.schema_literals import constants, key_of, type_of
from genlm_backend.generation.grammar.schema_numbers import is_number

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

        Raises:
            ConstraintError: (``ValueError``) If a value may fit two of them.
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
            f"options of oneOf are not known to be apart at {self._document.place(schema)}: give "
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
    if (listed := constants(schema)) is not None:
        numbers = [value for value in listed if is_number(value)]
    else:
        bounds = (schema.get(f"m{end}"), schema.get(f"exclusiveM{end}"))
        numbers = [bound for bound in bounds if is_number(bound)]
        return (min if end == "aximum" else max)(numbers, default=None)
    return (max if end == "aximum" else min)(numbers, default=None)


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema allows, with integers among the numbers."""
    values = constants(schema)
    found = types_of(schema) if values is None else tuple(map(type_of, values))
    return {"number" if kind == "integer" else kind for kind in found} & set(ALL_TYPES)
