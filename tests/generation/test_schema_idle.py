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
    {"uniqueItems": True, "maxItems": 1},
    {"type": "string", "uniqueItems": True},
    {"not": False},
    {"if": {"type": "null"}},
    {"if": {"type": "null"}, "then": True, "else": {}},
    {"if": False, "then": False},
    {"if": True, "else": False},
    {"then": False},
    {"else": False},
    {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 2, "maxContains": 3},
    {"unevaluatedItems": True, "unevaluatedProperties": {"title": "a"}},
    {"dependentRequired": {}, "dependentSchemas": {"a": {}}, "dependencies": {"a": []}},
    {"dependentRequired": {"a": []}},
    {"type": ["array", "null"], "dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False},
    {"propertyNames": {"type": "string"}},
    {"minLength": 0, "minItems": 0, "minProperties": 0, "required": [], "pattern": ""},
    {"properties": {}, "patternProperties": {}, "additionalProperties": {}, "items": {}},
    {"$dynamicAnchor": "a", "$recursiveAnchor": True, "$comment": "b", "nullable": False},
    {"$ref": "#b", "$defs": {"a": {"$dynamicAnchor": "b", "type": "array"}}},
]
BINDING = [
    {"uniqueItems": True},
    {"type": ["array", "null"], "uniqueItems": True, "maxItems": 2},
    {"not": {}},
    {"if": {"type": "null"}, "then": False},
    {"if": {"type": "null"}, "else": False},
    {"if": {}, "then": {"type": "null"}},
    {"contains": {"type": "null"}},
    {"contains": {"type": "null"}, "minContains": 0, "maxContains": 1},
    {"unevaluatedItems": False},
    {"unevaluatedProperties": False},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": False}},
    {"dependencies": {"a": ["b"]}},
    {"nullable": True},
]


@pytest.mark.parametrize("schema", IDLE, ids=json.dumps)
def test_what_rules_nothing_out_is_passed_over(byte_lm, schema):
    constraint = Constraint.from_json_schema(byte_lm, schema)
    for text in TEXTS:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert byte_model.allows(byte_lm, constraint, text) == is_valid, text


@pytest.mark.parametrize("schema", BINDING, ids=json.dumps)
def test_what_rules_something_out_is_refused(byte_lm, schema):
    with pytest.raises(ConstraintError, match=r"no constraint keeps to .* \(at #/items\)"):
        Constraint.from_json_schema(byte_lm, {"items": schema})


def test_an_older_draft_counts_what_arrays_contain_in_no_way(byte_lm):
    schema = {"contains": {"type": "null"}, "minContains": 0}
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    with pytest.raises(ConstraintError, match="'contains'"):
        Constraint.from_json_schema(byte_lm, {**draft, **schema})
