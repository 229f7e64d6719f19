"""What a constraint of a random schema lets through validates, with exact numbers, and back."""

import decimal
import json
from decimal import Decimal

import jsonschema
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from tests.generation import byte_model

WORDS = st.sampled_from(["a", "b", "ab", "a\n", "é", 'q"', "\x01", "\x7f", ""])
BIG = st.builds(
    lambda power, step: power + step,
    st.sampled_from([2**53, -(2**53), 2**63, -(2**63), 2**64, 10**30]),
    st.integers(-3, 3),
)
SMALL = st.integers(-120, 120)
FRACTIONS = st.decimals(-50, 50, places=2).map(float)
FINE = st.sampled_from([123456789.12345679, 1e22, 1e-7, 5e-324, 0.1 + 0.2, 1.7e308, 4.5e15])
NUMBERS = st.one_of(SMALL, BIG, FRACTIONS, FINE)
CONSTANTS = st.recursive(
    st.one_of(NUMBERS, WORDS, st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=3,
)
INTEGERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", ["integer", "null"]])},
    optional={
        name: st.one_of(SMALL, BIG, FRACTIONS)
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    },
)
REALS = st.fixed_dictionaries(
    {"type": st.just("number")},
    optional={
        name: st.one_of(SMALL, FRACTIONS, FINE)
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    },
)
MULTIPLES = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["integer", "number"]),
        "multipleOf": st.sampled_from([1, 3, 7, 256, 0.1, 0.01, 0.25, 0.75, 0.07, 0.3, 2.5, 1e-7]),
    },
    optional={"minimum": SMALL, "maximum": st.integers(0, 5000)},
)
STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(2, 5),
        "pattern": st.sampled_from(
            [
                "^[a-c]+$",
                "b",
                "^a|b$",
                "^\\d{2}$",
                "^\\W+$",
                "^[^\\s]*$",
                "^(a.|[^b])$",
                "[\\w-]",
                '^[^"]*$',
                "^[^\\\\]+$",
                "^[\\x00-!#-~]*$",
                "^\\n\\v?$",
            ]
        ),
        "format": st.sampled_from(["date", "ipv4", "password", "path"]),
    },
)


NAMES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries({"enum": st.lists(WORDS, max_size=3)}),
    st.sampled_from([
        {"pattern": "^a"}, {"pattern": "^[^a]*$"}, {"minLength": 1},
        {"maxLength": 1, "minLength": 0}, {"type": "string"}, {"format": "path"},
        {"const": "a"}, {"minimum": 3},
    ]),
)  # fmt: skip


def containers(inner):
    """Schemas of arrays and objects, and combinations of schemas."""
    maps = st.dictionaries(WORDS, inner, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": inner,
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "minItems": st.integers(0, 2),
                "maxItems": st.integers(1, 3),
                "uniqueItems": st.booleans(),
                "minContains": st.just(0),
                "unevaluatedItems": st.booleans(),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": maps,
                "patternProperties": st.dictionaries(
                    st.sampled_from(["^a", "^b", "b$", "^\n", '^[^"a]*$']), inner, max_size=2
                ),
                "propertyNames": NAMES,
                "additionalProperties": inner | st.booleans(),
                "required": st.lists(WORDS, max_size=2, unique=True),
                "minProperties": st.integers(0, 3),
                "maxProperties": st.integers(1, 3),
                "dependentRequired": st.just({}),
                "unevaluatedProperties": st.booleans(),
            },
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries(
            {"anyOf": st.lists(inner, min_size=1, max_size=2), "allOf": st.lists(inner, max_size=1)}
        ),
        st.just({"$ref": "#/$defs/a"}),
    )


SCHEMAS = st.recursive(
    st.one_of(
        CONSTANTS.map(lambda value: {"const": value}),
        st.lists(CONSTANTS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
        INTEGERS,
        REALS,
        MULTIPLES,
        STRINGS,
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, True, False]),
    ),
    containers,
    max_leaves=6,
)
"""Schemas of every keyword that is kept to."""


def exact(text):
    """JSON with numbers as they are written."""
    return json.loads(text, parse_float=Decimal)


def validator_of(schema):
    return jsonschema.Draft202012Validator(
        exact(json.dumps(schema)), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, shared=SCHEMAS, seed=st.integers(0, 1000))
def test_every_text_of_a_random_schema_validates(byte_lm, schema, shared, seed):
    assume(isinstance(schema, dict))
    schema = {**schema, "$defs": {"a": shared}}
    try:
        constraint = Constraint.from_json_schema(byte_lm, schema)
    except ConstraintError:
        return
    with decimal.localcontext(prec=1000):
        for more in range(3):
            text = byte_model.write(byte_lm, constraint, seed + more)
            if text is not None:
                validator_of(schema).validate(exact(text))


VALUES = st.recursive(
    st.one_of(
        st.integers(-20, 20),
        st.decimals(-20, 20, places=2).map(float).filter(lambda number: not number.is_integer()),
        st.sampled_from(["", "a", "b", "ab", "12", "!", '"', "\\", "é", "2024-01-01", "\t"]),
        st.booleans() | st.none(),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.just("a") | WORDS, inner, max_size=1)
    ),
    max_leaves=4,
)
"""Values that have one order of keys, and no number that is written in several ways."""


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=20, max_size=20))
def test_unescaped_json_values_are_allowed_if_and_only_if_valid(byte_lm, schema, values):
    assume(isinstance(schema, dict))
    schema = {**schema, "$defs": {"a": {"type": ["integer", "array"]}}}
    try:
        constraint = Constraint.from_json_schema(byte_lm, schema)
    except ConstraintError:
        return
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        is_written_otherwise = "\\u" in text or "\x7f" in text or "\\n" in text
        with decimal.localcontext(prec=1000):
            is_valid = validator_of(schema).is_valid(exact(text))
        is_allowed = byte_model.allows(byte_lm, constraint, text)
        assert is_allowed == is_valid or (is_valid and is_written_otherwise), text


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=CONSTANTS, name=WORDS, other=CONSTANTS)
def test_constants_are_allowed_as_json_dumps_writes_them(byte_lm, value, name, other):
    """Wherever they stand."""
    assume(is_written_as_json_does(value))
    places = [
        ({"const": value}, value),
        ({"enum": [other, value]}, value),
        ({"type": "array", "items": {"const": value}}, [value, value]),
        (
            {"properties": {name: {"$ref": "#/$defs/a"}}, "$defs": {"a": {"const": value}}},
            {name: value},
        ),
        ({"anyOf": [{"type": "boolean"}, {"const": value}]}, value),
    ]
    for schema, written in places:
        try:
            constraint = Constraint.from_json_schema(byte_lm, schema)
        except ConstraintError:
            continue
        assert byte_model.allows(byte_lm, constraint, json.dumps(written, ensure_ascii=False))


def is_written_as_json_does(value):
    """Whether no number in a value is a fraction of noughts, which is written as an integer."""
    if isinstance(value, list):
        return all(map(is_written_as_json_does, value))
    if isinstance(value, dict):
        return all(map(is_written_as_json_does, value.values()))
    return not (isinstance(value, float) and value.is_integer() and "e" not in repr(value))
