"""Numbers of JSON schemas are those that were written, or refused."""

import itertools
import json
from decimal import Decimal

import jsonschema
import pytest

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from tests.generation import byte_model

EDGES = [2**53, 2**53 + 1, 1234567890123456789, 2**64 - 1, -(2**63), 0.1 + 0.2, 1e22, 5e-324]


def allowed(lm, schema, texts):
    constraint = Constraint.from_json_schema(lm, schema)
    return [text for text in texts if byte_model.allows(lm, constraint, text)]


@pytest.mark.parametrize("number", EDGES)
def test_number_that_cannot_be_kept_exactly_raises_constraint_error(byte_lm, number):
    for schema in ({"const": number}, {"enum": ["a", [number]]}, {"const": {"a": number}}):
        with pytest.raises(ConstraintError, match=r"the number .* at #/items exactly"):
            Constraint.from_json_schema(byte_lm, {"items": schema})
    if number == 1e22:
        return
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        with pytest.raises(ConstraintError, match=rf"{keyword} .* at #/items exactly"):
            Constraint.from_json_schema(byte_lm, {"items": {"type": "integer", keyword: number}})


def test_integers_up_to_53_bits_are_exact(byte_lm):
    texts = [str(2**53 - step) for step in range(5)]
    assert allowed(byte_lm, {"const": 2**53 - 2}, texts) == [texts[2]]
    assert allowed(byte_lm, {"type": "integer", "minimum": 2**53 - 2}, texts) == texts[:3]
    assert allowed(byte_lm, {"type": "integer", "exclusiveMaximum": 2**53 - 2}, texts) == texts[3:]


def test_number_in_schema_text_is_not_rounded(byte_lm):
    with pytest.raises(ConstraintError, match=r"0\.30000000000000000000001 at #"):
        Constraint.from_json_schema(byte_lm, '{"enum": [0.30000000000000000000001]}')


EDGES_OF_RANGES = [-2, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 2, 9, 9.5, 10]


@pytest.mark.parametrize(("low", "high"), [*itertools.combinations(EDGES_OF_RANGES, 2)])
def test_number_bounds_are_enforced_even_if_close(byte_lm, low, high):
    for least, most in itertools.product(
        ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    ):
        bounds = [{least: low}, {most: high}]
        together = {"type": "number", least: low, most: high}
        for schema in (together, {"type": "number", "allOf": bounds}):
            try:
                constraint = Constraint.from_json_schema(byte_lm, schema)
            except ConstraintError:
                assert high - low < 1
                assert "exclusive" in least + most
                continue
            for number in EDGES_OF_RANGES:
                value = Decimal(str(number))
                is_in = low < value < high
                is_in |= (least, low) == ("minimum", number)
                is_in |= (most, high) == ("maximum", number)
                text = f"{number:.2f}".removesuffix(".00")
                assert byte_model.allows(byte_lm, constraint, text) <= is_in, schema
                for text in (f"{number:.1f}", f"{number:.3f}", f"-{number}".removeprefix("--")):
                    if byte_model.allows(byte_lm, constraint, text):
                        jsonschema.validate(Decimal(text), together)


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5},
        {"exclusiveMaximum": True, "maximum": 1, "minimum": 0.25},
        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
    ],
)
def test_excluded_integer_close_to_the_other_bound_raises_constraint_error(byte_lm, bounds):
    with pytest.raises(
        ConstraintError, match=r"exclusive bound at an integer .* less than 1 .* #/items"
    ):
        Constraint.from_json_schema(byte_lm, {"items": {"type": "number", **bounds}})


def test_multiple_of_that_llguidance_misreads_raises_constraint_error(byte_lm):
    for schema in (
        {"allOf": [{"type": "integer", "multipleOf": 65536}, {"multipleOf": 65537}]},
        {"$ref": "#/$defs/a", "multipleOf": 65537, "$defs": {"a": {"multipleOf": 65536}}},
    ):
        with pytest.raises(ConstraintError, match=r"multipleOf at #.*, #.* may apply to one"):
            Constraint.from_json_schema(byte_lm, schema)
    texts = ["65536", "65537", "4295032832", "131072"]
    apart = {"anyOf": [{"type": "integer", "multipleOf": n} for n in (65536, 65537)]}
    assert allowed(byte_lm, apart, texts) == texts
    for divisor in (0.07, 0, -1, 1e-30, 2**24, 2**31, 100_003, 1.00003):
        with pytest.raises(ConstraintError, match=r"multipleOf .* at #/items"):
            Constraint.from_json_schema(byte_lm, {"items": {"multipleOf": divisor}})


@pytest.mark.parametrize("divisor", [0.5, 0.25, 0.75, 2.5, 0.01, 12.5, 0.3, 7, 99_991])
@pytest.mark.parametrize("beside", [{}, {"minimum": -3.1}])
def test_multiple_of_is_enforced(byte_lm, divisor, beside):
    schema = {"type": "number", "multipleOf": divisor, **beside}
    constraint = Constraint.from_json_schema(byte_lm, schema)
    num_allowed = 0
    for number in [Decimal(n) / 1000 for n in range(-4000, 14000, 25)] + [Decimal(99_991)]:
        for text in (f"{number:f}", f"{number:.1f}", f"{number:.2f}", f"{number:.0f}"):
            if byte_model.allows(byte_lm, constraint, text):
                num_allowed += 1
                jsonschema.validate(
                    Decimal(text), json.loads(json.dumps(schema), parse_float=Decimal)
                )
    assert num_allowed


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "1e-999"])
def test_nan_or_out_of_range_number_raises_constraint_error(byte_lm, text):
    with pytest.raises(ConstraintError, match=f"{text} is not a finite number"):
        Constraint.from_json_schema(byte_lm, f'{{"const": {text}}}')
