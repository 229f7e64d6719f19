"""JSON schemas as callers give them, and what of their values no constraint keeps to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from genlm_backend.checks import shown
from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.schema_classes import (
    check_is_no_instance,
    is_class_with_schema,
    schema_of_class,
)
from genlm_backend.generation.grammar.schema_document import SchemaDocument, is_anything, merges
from genlm_backend.generation.grammar.schema_formats import FORMATS, UNCHECKED, likely_format
from genlm_backend.generation.grammar.schema_keywords import SIZES, types_of
from genlm_backend.generation.grammar.schema_numbers import (
    doubles,
    factor_of,
    have_common_multiple,
    inexact_bounds,
    is_number,
    is_quickly_built,
)
from genlm_backend.generation.grammar.schema_patterns import (
    has_dot,
    has_end,
    has_inner_end,
    has_unwritable,
    is_read_alike,
    portable,
)

_ENVELOPE = frozenset({"name", "description", "strict", "schema"})
"""Entries that OpenAI's API has around a schema."""

_LARGEST_EXPONENT = 400


def check_schema(schema: Mapping[str, Any] | bool | str | type[Any]) -> SchemaDocument:
    """Return a JSON schema with all the schemas in it."""
    if is_class_with_schema(schema):
        schema = schema_of_class(schema)
    check_is_no_instance(schema)
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        plain = json.loads(text, parse_float=_decimal, parse_constant=_decimal)
        json.dumps(doubles(plain), ensure_ascii=False).encode()  # lone surrogates are no JSON text
    except (TypeError, ValueError, RecursionError) as error:
        is_type = isinstance(schema, type) or hasattr(schema, "__origin__")
        hint = f"; pass pydantic.TypeAdapter({shown(schema)})" if is_type else ""
        raise ConstraintError(f"the schema is no JSON: {error}{hint}") from error
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
    """Return the schema of a ``response_format``, with or without OpenAI's wrapper."""
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


def check_values(document: SchemaDocument) -> None:
    """Refuse what llguidance would take for something else."""
    for schema in document:
        pointer = document.pointer(schema)
        types = types_of(schema)
        _check_sizes(schema, pointer)
        _check_numbers(schema, pointer)
        if "string" in types:
            _check_format(schema, pointer)
            if isinstance(pattern := schema.get("pattern"), str):
                portable(pattern, pointer)
        if "object" in types:
            _check_num_properties(schema, pointer)
            _check_keys(schema, pointer)
    _check_multiples(document)


def _check_sizes(schema: dict[str, Any], pointer: str) -> None:
    for name in SIZES & schema.keys():
        size = schema[name]
        if not is_number(size) or size != int(size) or not 0 <= size < 2**32:
            raise ConstraintError(f"{name} at {pointer} must be an integer from 0, got {size!r}")


def _check_numbers(schema: dict[str, Any], pointer: str) -> None:
    inexact = inexact_bounds(schema)
    if inexact and "number" in types_of(schema):
        raise ConstraintError(
            f"no constraint keeps to {inexact[0]} {schema[inexact[0]]} at {pointer} exactly, as it "
            'is no double of few digits: add "type": "integer", or take one of fewer digits'
        )
    divisor = schema.get("multipleOf")
    if inexact and divisor is not None:
        raise ConstraintError(
            f"no constraint keeps to {inexact[0]} {schema[inexact[0]]} beside multipleOf at "
            f"{pointer}: leave one of them out, or take a bound below 2**53"
        )
    if not is_number(divisor):
        return
    factor = factor_of(divisor)
    if factor is None and divisor < 2**32:
        raise ConstraintError(
            f"no constraint keeps to multipleOf {divisor} at {pointer} exactly, as doubles make "
            "another number of it: take an integer from 1 to 100000, or a power of ten from 1e-9 "
            "to 1e8"
        )
    if factor is None or not is_quickly_built(factor[0]):
        raise ConstraintError(
            f"multipleOf {divisor} at {pointer} is too much to build, as its digits make "
            "an automaton of as many states: take an integer from 1 to 100000, or below 100 "
            "times a power of ten, up to 1e8; or leave it out, and round what comes"
        )


def _check_multiples(document: SchemaDocument) -> None:
    """Refuse several ``multipleOf`` that may meet in one number."""
    factors = {
        document.pointer(schema): factor
        for schema in document
        if is_number(number := schema.get("multipleOf")) and (factor := factor_of(number))
    }
    if any(map(merges, document)) and not have_common_multiple(factors.values()):
        raise ConstraintError(
            f"the multipleOf at {', '.join(factors)} may meet in one number, and their product is "
            "beyond 32 bits, or too much to build: write their common multiple in one schema"
        )


def _check_format(schema: dict[str, Any], pointer: str) -> None:
    """Refuse formats that are not kept to, but for those that by all accounts are annotations."""
    name = schema.get("format")
    if name is None or (isinstance(name, str) and name in FORMATS):
        return
    near = likely_format(name) if isinstance(name, str) else None
    if isinstance(name, str) and name not in UNCHECKED and near is None:
        return
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(FORMATS)}"
    raise ConstraintError(
        f"no constraint keeps to format {name!r} at {pointer}: {hint}; or write it as a pattern"
    )


def _check_keys(schema: dict[str, Any], pointer: str) -> None:
    """Refuse patterns of keys that other keys may match by another reading."""
    others = schema.get("additionalProperties", True)
    others = True if is_anything(others) else others
    is_one_of_several = len(schema.get("patternProperties") or ()) > 1
    for pattern in schema.get("patternProperties") or ():
        is_same = portable(pattern, pointer) == pattern
        is_alike = is_read_alike(pattern) and not (has_dot(pattern) and others is not True)
        declared = [*(schema.get("properties") or ()), *(schema.get("required") or ())]
        odd = [name for name in declared if not (str(name).isascii() and str(name).isprintable())]
        unwritable = [name for name in odd if has_unwritable(str(name))]
        is_free = is_alike and not has_dot(pattern) and not has_end(pattern)
        if odd and not (is_free and (is_same or not unwritable)):
            raise ConstraintError(
                f"the pattern {shown(pattern)} of keys at {pointer} is read in several ways, and "
                f"may match the key {odd[0]!r} by one of them: write the characters out, "
                "without $, or leave that key to the pattern"
            )
        if (others is not False or is_one_of_several) and has_inner_end(pattern):
            raise ConstraintError(
                f"the pattern {shown(pattern)} of keys at {pointer} has a $ elsewhere than at its "
                "end, which by Python matches before a line break, and other keys are allowed: "
                'write it as ^(…)$, or forbid all others by "additionalProperties": false'
            )
        if others is not False and not is_alike:
            raise ConstraintError(
                f"the pattern {shown(pattern)} of keys at {pointer} has a class of characters that "
                "is read in several ways, and other keys are allowed: write it out, as [0-9] or "
                '[A-Za-z0-9_], or forbid others by "additionalProperties": false'
            )


def _check_num_properties(schema: dict[str, Any], pointer: str) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if not is_number(least) or is_closed:
        return
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if least > num_required + 1:
        raise ConstraintError(
            f"no constraint keeps to minProperties {least} at {pointer}, as a key that is not "
            f"declared may be written twice: at most {num_required + 1} is kept to beside "
            f"{num_required} required; name more keys in 'required', or forbid others by "
            '"additionalProperties": false'
        )
