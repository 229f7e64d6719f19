"""Numbers of JSON schemas are those that were written, whatever a double holds."""

import itertools
import json
import re
from decimal import Decimal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from genlm_backend.generation.grammar.schema_numbers import (
    factor_of,
    have_common_multiple,
    integers_within,
    is_exact,
    spellings,
)
from tests.generation import byte_model

EDGES = [2**53, 2**53 + 1, 1234567890123456789, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**40 + 1]


def allowed(lm, schema, texts):
    constraint = Constraint.from_json_schema(lm, schema)
    return [text for text in texts if byte_model.allows(lm, constraint, text)]


@pytest.mark.parametrize("number", EDGES)
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_integers_of_any_size_are_constants(byte_lm, number, keyword):
    texts = [str(number + step) for step in range(-2, 3)]
    value = [number, "a"] if keyword == "enum" else number
    assert allowed(byte_lm, {keyword: value}, texts) == [str(number)]
    inside = {"type": "object", "properties": {"id": {keyword: value}, "b": {}}, "required": ["id"]}
    texts = [f'{{"id": {text}, "b":[1 ,{{}}], "more":1}}' for text in texts]
    assert allowed(byte_lm, inside, texts) == [f'{{"id": {number}, "b":[1 ,{{}}], "more":1}}']


@pytest.mark.parametrize("number", EDGES)
def test_bounds_of_any_size_are_kept_to_by_integers(byte_lm, number):
    texts = [str(number + step) for step in range(-2, 3)]
    for keyword, expected in [
        ("minimum", texts[2:]),
        ("exclusiveMinimum", texts[3:]),
        ("maximum", texts[:3]),
        ("exclusiveMaximum", texts[:2]),
    ]:
        assert allowed(byte_lm, {"type": "integer", keyword: number}, texts) == expected
        either = {"type": ["null", "integer"], keyword: number}
        assert allowed(byte_lm, either, [*texts, "null"]) == [*expected, "null"]
        with pytest.raises(ConstraintError, match=rf'{keyword} {number} at #.*"type": "integer"'):
            Constraint.from_json_schema(byte_lm, {keyword: number})


EDGES_OF_RANGES = [-2, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 2, 9, 9.5, 10]


@pytest.mark.parametrize(("low", "high"), [*itertools.combinations(EDGES_OF_RANGES, 2)])
def test_bounds_of_numbers_are_kept_to_however_close_they_are(byte_lm, low, high):
    for least, most in itertools.product(
        ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    ):
        bounds = [{least: low}, {most: high}]
        together = {"type": "number", least: low, most: high}
        for schema in (together, {"type": "number", "allOf": bounds}):
            constraint = Constraint.from_json_schema(byte_lm, schema)
            for number in EDGES_OF_RANGES:
                value = Decimal(str(number))
                is_in = low < value < high
                is_in |= (least, low) == ("minimum", number)
                is_in |= (most, high) == ("maximum", number)
                assert byte_model.allows(byte_lm, constraint, str(number)) == is_in, schema
                for text in (f"{number:.1f}", f"{number:.3f}", f"-{number}".removeprefix("--")):
                    if byte_model.allows(byte_lm, constraint, text):
                        jsonschema.validate(Decimal(text), together)


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.1},
        {"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5},
        {"exclusiveMaximum": True, "maximum": 1, "minimum": 0.25},
        {"exclusiveMinimum": 0, "minimum": -1, "maximum": 0.5},
    ],
)
def test_excluded_integers_are_excluded_in_every_draft(byte_lm, bounds):
    found = allowed(byte_lm, {"type": "number", **bounds}, ["0", "0.0", "-0", "0.5", "1", "1.0"])
    assert found == ["0.5"]


@pytest.mark.parametrize(
    "number", [123456789.12345679, 0.1 + 0.2, 1e22, 1e-7, 5e-324, 1.7976931348623157e308, -1e300]
)
def test_doubles_are_constants_as_json_writes_them(byte_lm, number):
    written = json.dumps(number)
    close = [written, written[:-1] + str((int(written[-1]) + 1) % 10)]
    assert allowed(byte_lm, {"const": number}, close) == [written]
    if is_exact(Decimal(written)):
        return
    with pytest.raises(ConstraintError, match="minimum"):
        Constraint.from_json_schema(byte_lm, {"type": "number", "minimum": number})


def test_a_schema_as_text_has_the_numbers_that_are_in_it(byte_lm):
    number = "0.30000000000000000000001"
    texts = [number, "0.3", "0.30000000000000004"]
    assert allowed(byte_lm, f'{{"enum": [{number}]}}', texts) == [number]


def test_constants_with_numbers_go_with_what_rules_can_express(byte_lm):
    number = 2**60 + 1
    node = {
        "type": "object",
        "properties": {
            "id": {"const": number},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "no": False,
        },
        "required": ["id"],
    }
    texts = [
        f'{{"id":{number},"next":{{"id":{number},"next":null}}}}',
        f'{{"id":{number} , "next":{{"id":{number - 1},"next":null}}}}',
        f'{{"id":{number},"no":1}}',
        f'{{"id":{number},"\\u006eo":1}}',
        f'{{"id":{number},"on":1,"on":2}}',
        '{"next":null}',
        "{}",
    ]
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    assert allowed(byte_lm, schema, texts) == [texts[0], texts[4]]
    kinds = [
        {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]}
        for k in (number, number + 2)
    ]
    texts = [f'{{"k":{k}}}' for k in range(number - 1, number + 4)]
    assert allowed(byte_lm, {"oneOf": kinds}, texts) == [texts[1], texts[3]]


def test_options_of_one_of_are_apart_or_refused(byte_lm):
    number = 2**60 + 1
    one, other = ({"const": number}, {"enum": [number + 2, "a"]})
    apart = [
        (other, {"type": "null"}),
        ({"type": "string"}, {"type": "object"}),
        ({"$ref": "#/$defs/a"}, False),
    ]
    for options in apart:
        schema = {"oneOf": [one, *options], "$defs": {"a": other}}
        constraint = Constraint.from_json_schema(byte_lm, schema)
        for text in (str(number), str(number + 2), '"a"', "null", "{}", "[]"):
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
            assert byte_model.allows(byte_lm, constraint, text) == is_valid
    properties = {"type": "object", "properties": {"k": {"const": number}}}
    meeting = [
        [one, {"enum": [number, 3]}],
        [one, {"type": "integer"}],
        [one, {"minimum": 3}],
        [one, True],
        [{"enum": [number, {"k": 1}]}, {"type": "object"}],
        [properties, {"type": "object", "properties": {"k": other}}],  # k is in neither required
        [{"$ref": "#/$defs/a"}, {"anyOf": [other]}],
    ]
    for options in meeting:
        with pytest.raises(ConstraintError, match="options of oneOf are not known to be apart"):
            Constraint.from_json_schema(byte_lm, {"oneOf": options, "$defs": {"a": other}})


@pytest.mark.parametrize(
    ("low", "high"), [(0, None), (1, None), (2, None), (0, 2), (1, 3), (0, 0), (2, 2), (0, 1)]
)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_arrays_with_large_numbers_have_as_many_items_as_they_may(byte_lm, low, high, first):
    number = 2**60 + 1
    schema = {"type": "array", "minItems": low, "items": {"const": number}}
    schema |= {} if high is None else {"maxItems": high}
    schema |= {"prefixItems": [{"enum": [0, number]}, {"type": "null"}][:first]} if first else {}
    start = ["0", "null"][:first]
    items = [*start, *[str(number)] * 5]
    texts = [f"[{', '.join(items[:size])}]" for size in range(6)]
    wanted = [
        text for size, text in enumerate(texts) if low <= size <= (5 if high is None else high)
    ]
    assert allowed(byte_lm, schema, texts) == wanted


@pytest.mark.parametrize("whitespace", ["", " ?", "[ \n]*", r"(?:\n|\t)?", " /?"])
def test_white_space_is_as_everywhere(byte_lm, whitespace):
    made = [
        Constraint.from_json_schema(
            byte_lm, {"enum": [[number, {"a": "b"}]]}, whitespace=whitespace
        )
        for number in (1, 2**60 + 1)
    ]
    for space in ["", " ", "  ", "\n", "\n  \n", "\t", " /"]:
        is_wanted = not space or bool(re.fullmatch(whitespace, space))
        for small, large in zip(*texts_with(space), strict=True):
            allowed = [
                byte_model.allows(byte_lm, *one) for one in zip(made, (small, large), strict=True)
            ]
            assert allowed == [is_wanted] * 2, large


def texts_with(space):
    """Texts of two lists that differ in a number, each with white space in one place."""
    for number in (1, 2**60 + 1):
        parts = ["[", str(number), ",", "{", '"a"', ":", '"b"', "}", "]"]
        yield ["".join(parts[:i]) + space + "".join(parts[i:]) for i in range(1, len(parts))]


@pytest.mark.parametrize(
    "beside",
    [
        {"allOf": [{"type": "integer"}]},
        {"anyOf": [{"type": "integer"}]},
        {"minimum": 3},
        {"multipleOf": 3},
    ],
)
def test_what_rules_cannot_express_is_refused(byte_lm, beside):
    with pytest.raises(ConstraintError, match=f"at #/items has numbers .*{next(iter(beside))}"):
        Constraint.from_json_schema(byte_lm, {"items": {"const": 2**60 + 1, **beside}})


@settings(deadline=None)
@given(st.integers(), st.integers() | st.none(), st.lists(st.integers(), max_size=20))
def test_the_pattern_of_a_range_matches_its_integers(low, size, others):
    high = None if size is None else low + size
    for least, most in [(low, high), (None, low)]:
        pattern = integers_within(least, most)
        near = [edge + step for edge in (low, high or 0, 0) for step in (-11, -1, 0, 1, 9)]
        for number in [*near, *others]:
            is_within = (least is None or least <= number) and (most is None or number <= most)
            assert bool(re.fullmatch(pattern, str(number)) if pattern else False) == is_within


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6) | st.integers())
def test_the_texts_of_a_number_are_that_number(number):
    assert all(Decimal(text) == number for text in spellings(number))


def test_what_doubles_hold_is_known():
    assert all(map(is_exact, [0, -1, 2**53 - 1, Decimal("0.1"), Decimal("1e15")]))
    assert not any(map(is_exact, [2**53, Decimal("1e16"), Decimal("0.30000000000000004")]))
    assert factor_of(Decimal("0.01")) == (1, 2)
    assert factor_of(Decimal("0.07")) is None  # it would be 7000000000000001 · 10⁻¹⁷
    assert factor_of(0) is None
    assert have_common_multiple([(3, 0), (5, 1)])
    assert not have_common_multiple([(65536, 0), (65537, 0)])


def test_multiples_that_llguidance_would_get_wrong_are_refused(byte_lm):
    texts = ["65536", "65537", "4295032832", "131072"]
    for schema in (
        {"allOf": [{"type": "integer", "multipleOf": 65536}, {"multipleOf": 65537}]},
        {"allOf": [{"type": "integer", "multipleOf": 32768}, {"multipleOf": 32767}]},
        {"$ref": "#/$defs/a", "multipleOf": 65537, "$defs": {"a": {"multipleOf": 65536}}},
    ):
        with pytest.raises(ConstraintError, match=r"multipleOf at #.*, #.* may meet in one number"):
            Constraint.from_json_schema(byte_lm, schema)
    apart = {"anyOf": [{"type": "integer", "multipleOf": n} for n in (65536, 65537)]}
    assert allowed(byte_lm, apart, texts) == texts
    for divisor in (0.07, 0, -1, 1e-30):
        with pytest.raises(ConstraintError, match="multipleOf"):
            Constraint.from_json_schema(byte_lm, {"type": "number", "multipleOf": divisor})


@pytest.mark.parametrize(
    "divisor", [2**24, 2**31, 2**32, 86_400_000, 100_003, 999 * 10**5, 1.00003]
)
def test_multiples_that_would_take_long_to_build_are_refused(byte_lm, divisor):
    for kind in ("integer", "number"):
        with pytest.raises(
            ConstraintError, match=r"multipleOf .* at #/items is too much to build.*100"
        ):
            Constraint.from_json_schema(byte_lm, {"items": {"type": kind, "multipleOf": divisor}})


@pytest.mark.parametrize("divisor", [86_400, 99_991, 65_536, 3_600_000, 99 * 10**6, 10**8])
def test_multiples_up_to_the_limit_are_kept_to(byte_lm, divisor):
    texts = [str(divisor * times + step) for times in (1, 7) for step in (0, 1)]
    assert allowed(byte_lm, {"type": "integer", "multipleOf": divisor}, texts) == texts[::2]


@pytest.mark.parametrize("divisor", [0.5, 0.25, 0.125, 0.75, 1.25, 2.5, 0.01, 0.02, 12.5, 0.3])
@pytest.mark.parametrize("beside", [{}, {"minimum": -3.1}, {"allOf": [{"multipleOf": 0.25}]}])
def test_multiples_are_let_through_as_json_writes_them(byte_lm, divisor, beside):
    schema = {"type": "number", "multipleOf": divisor, **beside}
    constraint = Constraint.from_json_schema(byte_lm, schema)
    for thousandths in range(-4000, 4000, 25):
        number = Decimal(thousandths) / 1000
        is_in = number % Decimal(str(divisor)) == 0
        is_in &= "minimum" not in beside or number >= Decimal("-3.1")
        is_in &= "allOf" not in beside or number % Decimal("0.25") == 0
        text = json.dumps(int(number) if number == int(number) else float(number))
        assert byte_model.allows(byte_lm, constraint, text) == is_in, text


@pytest.mark.parametrize("bound", [0.25, 0.125, 1.25, 10.05, -0.25, -2.75])
@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_numbers_with_fewer_digits_than_a_bound_are_within_it(byte_lm, bound, keyword):
    sign = 1 if "inimum" in keyword else -1
    written = {"type": "number", keyword: bound}
    within = {"exclusiveMinimum": -20, "maximum": 20}
    within.pop(keyword, None)
    for schema in (written, {"type": ["null", "number"], "allOf": [written, within]}):
        constraint = Constraint.from_json_schema(byte_lm, schema)
        for hundredths in [*range(-300, 300, 5), 1000, 1005, 1010]:
            number = Decimal(hundredths) / 100
            text = json.dumps(int(number) if number == int(number) else float(number))
            is_in = (number - Decimal(str(bound))) * sign > 0
            is_in |= keyword[:2] == "mi" and number == Decimal(str(bound))
            is_in |= keyword[:2] == "ma" and number == Decimal(str(bound))
            assert byte_model.allows(byte_lm, constraint, text) == is_in, text


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "1e-999"])
def test_numbers_that_are_none_are_refused(byte_lm, text):
    with pytest.raises(ConstraintError, match=f"{text} is no number"):
        Constraint.from_json_schema(byte_lm, f'{{"const": {text}}}')
