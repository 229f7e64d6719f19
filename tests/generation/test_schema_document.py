"""References of JSON schemas, and the drafts that their keywords are of."""

import json

import jsonschema
import pytest

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from tests.generation import byte_model


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/definitions/a", "definitions": {"a": {"type": "integer"}}},
        {"$ref": "#/anyOf/0", "anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "integer"}}},
        {"$ref": "#a", "$defs": {"b": {"$anchor": "a", "type": "integer"}}},
        {"anyOf": [{"$ref": "#/$defs/a"}, False], "$defs": {"a": {"type": "integer"}}},
        {"allOf": [{"$ref": "#/$defs/yes"}, {"type": "integer"}], "$defs": {"yes": True}},
    ],
    ids=json.dumps,
)
def test_references_resolve_as_in_the_validator(byte_lm, schema):
    constraint = Constraint.from_json_schema(byte_lm, schema)
    for text in ("1", '"a"', "null", "[1]"):
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert byte_model.allows(byte_lm, constraint, text) == is_valid


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/x"},
        {"$ref": "#x"},
        {"$ref": "http://json-schema.org/draft-07/schema#"},
        {"items": {"$ref": "other.json"}},
        {"$ref": "#/x-a/7", "x-a": [{}]},
        {"$ref": "#/title", "title": "a"},
        {"$ref": "#/x-a", "x-a": {"type": "integer"}},
        {"$id": "http://a/b", "$ref": "http://a/b#/$defs/c", "$defs": {"c": {"type": "integer"}}},
    ],
    ids=json.dumps,
)
def test_unresolvable_reference_raises_constraint_error(byte_lm, schema):
    with pytest.raises(ConstraintError, match=r"\$ref '.*' at #.* does not exist in the schema"):
        Constraint.from_json_schema(byte_lm, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        },
        {"items": {"$ref": "#/items"}},
    ],
    ids=json.dumps,
)
def test_circular_reference_without_a_value_raises_constraint_error(byte_lm, schema):
    with pytest.raises(ConstraintError, match=r"at #.* refers to itself"):
        Constraint.from_json_schema(byte_lm, schema)


@pytest.mark.parametrize("shared", [{"type": "integer"}, {"const": 11}], ids=str)
def test_recursive_schema_of_a_tree_is_accepted(byte_lm, shared):
    schema = {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
        "$defs": {"a": shared},
    }
    constraint = Constraint.from_json_schema(byte_lm, schema)
    number = shared.get("const", 7)
    assert byte_model.allows(byte_lm, constraint, f"[{number},[[{number}], []]]")
    assert not byte_model.allows(byte_lm, constraint, f"[{number},[null]]")


def test_nested_id_raises_constraint_error(byte_lm):
    schema = {"$ref": "#/$defs/c", "$defs": {"c": {"$id": "b", "type": "integer"}}}
    with pytest.raises(ConstraintError, match=r"\$id at #/\$defs/c is not supported: leave it out"):
        Constraint.from_json_schema(byte_lm, schema)


def test_items_as_a_list_act_by_draft_and_mixed_drafts_raise_error(byte_lm):
    schema = {"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}}
    constraint = Constraint.from_json_schema(byte_lm, schema)
    assert byte_model.allows(byte_lm, constraint, "[null, 1]")
    assert not byte_model.allows(byte_lm, constraint, "[null, null]")
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    for mixed in (
        {"prefixItems": [{"type": "null"}], "additionalItems": False},
        {"prefixItems": [{}], "items": [{}]},
        {**draft, "prefixItems": [{}]},
    ):
        with pytest.raises(ConstraintError, match=r"Items at #"):
            Constraint.from_json_schema(byte_lm, mixed)


def test_a_schema_that_is_nested_too_deeply_is_refused(byte_lm):
    schema = {"type": "integer"}
    for _ in range(150):
        schema = {"items": schema}
    with pytest.raises(ConstraintError, match="nested more than 100 levels deep"):
        Constraint.from_json_schema(byte_lm, schema)


@pytest.mark.parametrize("size", [-1, 2.5, "2", True, 2**70])
def test_invalid_max_items_raises_constraint_error(byte_lm, size):
    with pytest.raises(ConstraintError, match=r"Expected .* 'maxItems', .*\(at #/items\)"):
        Constraint.from_json_schema(byte_lm, {"items": {"maxItems": size}})
