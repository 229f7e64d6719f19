"""Keywords that rule nothing out are passed over, and refused where they do."""

import json

import jsonschema
import pytest

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from tests.generation import byte_model

TEXTS = ["null", "1", '"a"', "[]", "[1]", "[1, 1]", "{}", '{"a": 1}', '{"a": 1, "b": 1}']
IDLE = [
    {"uniqueItems": False},
    {"minLength": 0, "minItems": 0, "minProperties": 0, "required": [], "pattern": ""},
    {"properties": {}, "patternProperties": {}, "additionalProperties": {}, "items": {}},
    {"$comment": "b", "nullable": False, "x-own": 1},
]
BINDING = [
    {"uniqueItems": True},
    {"not": {}},
    {"if": {}, "then": {"type": "null"}},
    {"contains": {"type": "null"}},
    {"unevaluatedItems": False},
    {"unevaluatedProperties": False},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": False}},
    {"dependencies": {"a": ["b"]}},
    {"propertyNames": {"pattern": "^a"}},
    {"contentEncoding": "base64"},
    {"$dynamicRef": "#"},
    {"nullable": True},
]


@pytest.mark.parametrize("schema", IDLE, ids=json.dumps)
def test_keyword_values_without_effect_are_ignored(byte_lm, schema):
    constraint = Constraint.from_json_schema(byte_lm, schema)
    for text in TEXTS:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert byte_model.allows(byte_lm, constraint, text) == is_valid, text


@pytest.mark.parametrize("schema", BINDING, ids=json.dumps)
def test_unsupported_keyword_with_effect_raises_constraint_error(byte_lm, schema):
    with pytest.raises(ConstraintError, match=r"a constraint cannot enforce .* \(at #/items\)"):
        Constraint.from_json_schema(byte_lm, {"items": schema})
