"""Values of keywords of JSON schemas, as far as llguidance does not keep to them."""

from __future__ import annotations

from decimal import Decimal
from math import ceil, floor
from typing import Any

from genlm_backend.checks import shown
from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.schema_document import SchemaDocument, rules, types_of
from genlm_backend.generation.grammar.schema_formats import FORMATS, UNCHECKED, likely_format
from genlm_backend.generation.grammar.schema_idle import is_anything
from genlm_backend.generation.grammar.schema_keywords import SIZES
from genlm_backend.generation.grammar.schema_numbers import (
    beside,
    factor_of,
    have_common_multiple,
    is_exact,
    is_number,
    is_quickly_built,
    shortened,
)
from genlm_backend.generation.grammar.schema_patterns import (
    has_dot,
    has_end,
    has_inner_end,
    has_unwritable,
    is_read_alike,
    portable,
)

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def check_values(document: SchemaDocument) -> None:
    """Refuse what llguidance would take for something else.

    Raises:
        ConstraintError: (``ValueError``) If there is such a value; the message names it, where
            it is and what can be written instead.
    """
    for schema in document:
        place = document.place(schema)
        types = types_of(schema)
        _check_sizes(schema, place)
        _check_numbers(schema, place)
        if "string" in types:
            _check_format(schema, place)
            if isinstance(pattern := schema.get("pattern"), str):
                portable(pattern, place)
        if "object" in types:
            _check_num_properties(schema, place)
            _check_keys(schema, place)
    _check_multiples(document)


def inexact_bounds(schema: dict[str, Any]) -> list[str]:
    """Return the bounds of a schema that llguidance would take for others."""
    return [name for name in BOUNDS if is_number(bound := schema.get(name)) and not is_exact(bound)]


def integer_bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the least and the greatest integer that the bounds of a schema allow."""
    low, high = schema.get("minimum"), schema.get("maximum")
    lows = [ceil(low)] if is_number(low) else []
    highs = [floor(high)] if is_number(high) else []
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    above = low if above is True else above  # as in draft 4
    below = high if below is True else below
    lows += [floor(above) + 1] if is_number(above) else []
    highs += [ceil(below) - 1] if is_number(below) else []
    return max(lows, default=None), min(highs, default=None)


def excluded_integers(schema: dict[str, Any], is_merged: bool) -> dict[str, Decimal]:
    """Return the bounds to have in the place of exclusive ones, where llguidance includes these.

    It lets an integer through that is excluded, where there is no other one up to the opposite
    bound: 0 where a number is above 0 and at most 0.5. The bounds that are returned are inclusive,
    and next to the integers.

    Args:
        schema: A schema.
        is_merged: Whether the opposite bound may be another schema's.
    """
    if "number" not in types_of(schema):
        return {}
    found: dict[str, Decimal] = {}
    (low, is_above), (high, is_below) = _bound(schema, "inimum"), _bound(schema, "aximum")
    if not is_merged and (low is None or high is None or high - low >= 1):
        return {}
    if low is not None and is_above and low == int(low):
        found["minimum"] = beside(low, 1)
    if high is not None and is_below and high == int(high):
        found["maximum"] = beside(high, -1)
    return found


def _bound(schema: dict[str, Any], end: str) -> tuple[int | Decimal | None, bool]:
    """Return a bound of a schema, and whether it is excluded."""
    bound, excluded = schema.get(f"m{end}"), schema.get(f"exclusiveM{end}")
    sign = 1 if end == "inimum" else -1
    bound = bound if is_number(bound) else None
    if is_number(excluded) and (bound is None or excluded * sign >= bound * sign):
        return excluded, True
    return bound, excluded is True  # as in draft 4


def shorter_numbers(schema: dict[str, Any], bounds: dict[str, Any]) -> list[float]:
    """Return the numbers within bounds that have fewer digits than one of these begins with.

    Args:
        schema: A schema.
        bounds: Its bounds as llguidance gets them: numbers that are doubles, or booleans.
    """
    if "number" not in types_of(schema):
        return []
    exact = {
        name: Decimal(repr(bound)) if isinstance(bound, float) else bound
        for name, bound in bounds.items()
    }
    (low, is_above), (high, is_below) = _bound(exact, "inimum"), _bound(exact, "aximum")
    found = {
        number
        for bound in exact.values()
        if is_number(bound)
        for number in shortened(bound)
        if number != int(number)
        and (low is None or number > low or (number == low and not is_above))
        and (high is None or number < high or (number == high and not is_below))
    }
    return sorted(map(float, found))


def _check_sizes(schema: dict[str, Any], place: str) -> None:
    for name in SIZES & schema.keys():
        size = schema[name]
        if not is_number(size) or size != int(size) or not 0 <= size < 2**32:
            raise ConstraintError(f"{name} at {place} must be an integer from 0, got {size!r}")


def _check_numbers(schema: dict[str, Any], place: str) -> None:
    inexact = inexact_bounds(schema)
    if inexact and "number" in types_of(schema):
        raise ConstraintError(
            f"no constraint keeps to {inexact[0]} {schema[inexact[0]]} at {place} exactly, as it "
            'is no double of few digits: add "type": "integer", or take one of fewer digits'
        )
    divisor = schema.get("multipleOf")
    if inexact and divisor is not None:
        raise ConstraintError(
            f"no constraint keeps to {inexact[0]} {schema[inexact[0]]} beside multipleOf at "
            f"{place}: leave one of them out, or take a bound below 2**53"
        )
    if not is_number(divisor):
        return
    factor = factor_of(divisor)
    if factor is None and divisor < 2**32:
        raise ConstraintError(
            f"no constraint keeps to multipleOf {divisor} at {place} exactly, as doubles make "
            "another number of it: take an integer from 1 to 100000, or a power of ten from 1e-9 "
            "to 1e8"
        )
    if factor is None or not is_quickly_built(factor[0]):
        raise ConstraintError(
            f"multipleOf {divisor} at {place} is too much to build, as its digits make "
            "an automaton of as many states: take an integer from 1 to 100000, or below 100 "
            "times a power of ten, up to 1e8; or leave it out, and round what comes"
        )


def _check_multiples(document: SchemaDocument) -> None:
    """Refuse several ``multipleOf`` that may meet in one number."""
    factors = {
        document.place(schema): factor
        for schema in document
        if is_number(number := schema.get("multipleOf")) and (factor := factor_of(number))
    }
    if any(map(merges, document)) and not have_common_multiple(factors.values()):
        raise ConstraintError(
            f"the multipleOf at {', '.join(factors)} may meet in one number, and their product is "
            "beyond 32 bits, or too much to build: write their common multiple in one schema"
        )


def merges(schema: dict[str, Any]) -> bool:
    """Tell whether a value may be kept to several schemas by way of this one."""
    in_place = {"$ref", "allOf", "anyOf", "oneOf"} & schema.keys()
    return (
        "allOf" in schema
        or (bool(in_place) and len(rules(schema)) > 1)
        or bool(schema.get("patternProperties"))
    )


def _check_format(schema: dict[str, Any], place: str) -> None:
    """Refuse formats that are not kept to, but for those that by all accounts are annotations."""
    name = schema.get("format")
    if name is None or (isinstance(name, str) and name in FORMATS):
        return
    near = likely_format(name) if isinstance(name, str) else None
    if isinstance(name, str) and name not in UNCHECKED and near is None:
        return
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(FORMATS)}"
    raise ConstraintError(
        f"no constraint keeps to format {name!r} at {place}: {hint}; or write it as a pattern"
    )


def _check_keys(schema: dict[str, Any], place: str) -> None:
    """Refuse patterns of keys that other keys may match by another reading."""
    others = schema.get("additionalProperties", True)
    others = True if is_anything(others) else others
    is_one_of_several = len(schema.get("patternProperties") or ()) > 1
    for pattern in schema.get("patternProperties") or ():
        is_same = portable(pattern, place) == pattern
        is_alike = is_read_alike(pattern) and not (has_dot(pattern) and others is not True)
        declared = [*(schema.get("properties") or ()), *(schema.get("required") or ())]
        odd = [name for name in declared if not (str(name).isascii() and str(name).isprintable())]
        unwritable = [name for name in odd if has_unwritable(str(name))]
        is_free = is_alike and not has_dot(pattern) and not has_end(pattern)
        if odd and not (is_free and (is_same or not unwritable)):
            raise ConstraintError(
                f"the pattern {shown(pattern)} of keys at {place} is read in several ways, and may "
                f"match the key {odd[0]!r} by one of them: write the characters out, "
                "without $, or leave that key to the pattern"
            )
        if (others is not False or is_one_of_several) and has_inner_end(pattern):
            raise ConstraintError(
                f"the pattern {shown(pattern)} of keys at {place} has a $ elsewhere than at its "
                "end, which by Python matches before a line break, and other keys are allowed: "
                'write it as ^(…)$, or forbid all others by "additionalProperties": false'
            )
        if others is not False and not is_alike:
            raise ConstraintError(
                f"the pattern {shown(pattern)} of keys at {place} has a class of characters that "
                "is read in several ways, and other keys are allowed: write it out, as [0-9] or "
                '[A-Za-z0-9_], or forbid others by "additionalProperties": false'
            )


def _check_num_properties(schema: dict[str, Any], place: str) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if not is_number(least) or is_closed:
        return
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if least > num_required + 1:
        raise ConstraintError(
            f"no constraint keeps to minProperties {least} at {place}, as a key that is not "
            f"declared may be written twice: at most {num_required + 1} is kept to beside "
            f"{num_required} required; name more keys in 'required', or forbid others by "
            '"additionalProperties": false'
        )
