"""Names of properties are kept to, or refused by place."""

import enum
import json
from datetime import date
from typing import Annotated, Literal

import jsonschema
import pytest
from pydantic import StringConstraints, TypeAdapter

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from tests.generation import byte_model

KEYS = ["a", "b", "ab", "", 'q"', "\\", "é", "2024-01-01", "a\n"]
OBJECTS = [{}] + [{key: value} for key in KEYS for value in (1, None, "x")]
OBJECTS += [{"a": 1, key: 1} for key in KEYS if key != "a"]  # in the order of declarations


class Colour(enum.Enum):
    RED = "a"
    BLUE = "é"


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"enum": ["a", "é", 1, 'q"']}},
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        {"propertyNames": {"const": "b"}, "properties": {"a": {}, "b": {"type": "null"}}},
        {"propertyNames": {"enum": ["a", "b"]}, "minProperties": 1},
        {"propertyNames": {"enum": ["a"]}, "required": ["a"], "type": ["object", "null"]},
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
        {"propertyNames": {"pattern": '^[^"]$', "type": "string"}},
        {"propertyNames": {"minLength": 2}},
        {"propertyNames": {"minLength": 1, "maxLength": 1}},
        {"propertyNames": {"format": "date"}},
        {"propertyNames": {"format": "path"}},
        {"propertyNames": False},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"minimum": 3}},
        {"propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": ["b"]}}},
        {"allOf": [{"propertyNames": {"pattern": "^a"}}, {"propertyNames": {"enum": ["a", "b"]}}]},
        {"anyOf": [{"propertyNames": {"enum": ["a"]}}, {"type": "null"}]},
    ],
    ids=json.dumps,
)
def test_names_are_those_that_the_validator_allows(byte_lm, schema):
    constraint = Constraint.from_json_schema(byte_lm, schema)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for value in [*OBJECTS, None]:
        text = json.dumps(value, ensure_ascii=False)
        is_allowed = byte_model.allows(byte_lm, constraint, text)
        is_valid = validator.is_valid(value)
        assert is_allowed == is_valid or (not is_allowed and "a\n" in value), text


@pytest.mark.parametrize(
    "kind",
    [
        dict[Literal["a", "b"], int],
        dict[Colour, int],
        dict[date, int],
        dict[Annotated[str, StringConstraints(min_length=1)], int],
    ],
    ids=str,
)
def test_keys_of_pydantic_are_kept_to(byte_lm, kind):
    adapter = TypeAdapter(kind)
    constraint = Constraint.from_json_schema(byte_lm, adapter.json_schema())
    num_allowed = 0
    for value in OBJECTS:
        text = json.dumps(value, ensure_ascii=False)
        if byte_model.allows(byte_lm, constraint, text):
            adapter.validate_json(text)
            num_allowed += 1
    assert num_allowed >= 2


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"pattern": "^a", "minLength": 2}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        {"propertyNames": {"pattern": "^a"}, "patternProperties": {"^b": {}}},
        {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^b": {}}},
        {"propertyNames": {"anyOf": [{"const": "a"}]}},
        {"propertyNames": {"format": "hostname"}},
    ],
    ids=json.dumps,
)
def test_names_that_cannot_be_kept_to_are_refused(byte_lm, schema):
    with pytest.raises(ConstraintError, match=r"propertyNames at #/items with .*: give names"):
        Constraint.from_json_schema(byte_lm, {"items": schema})


def test_a_constant_that_is_a_schema_too_stays_as_it_is(byte_lm):
    constant = {"propertyNames": {"enum": ["a"]}}
    schema = {"properties": {"c": {"const": constant}, "d": {"$ref": "#/properties/c/const"}}}
    constraint = Constraint.from_json_schema(byte_lm, schema)
    text = json.dumps({"c": constant, "d": {"a": 1}})
    assert byte_model.allows(byte_lm, constraint, text)
    assert not byte_model.allows(byte_lm, constraint, text.replace('"a": 1', '"b": 1'))
