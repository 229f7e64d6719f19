"""References of JSON schemas, and the drafts that their keywords are of."""

import json

import jsonschema
import pytest

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from genlm_backend.generation.grammar.schema_keywords import ANNOTATIONS, HONOURED, draft_of
from tests.generation import byte_model

WRONG = {"typ": "integer"}
DRAFTS = {
    draft_of(uri): (uri, validator)
    for uri, validator in jsonschema.validators._META_SCHEMAS.items()
    if "draft-03" not in uri
}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#/x-shared/a", "x-shared": {"a": WRONG}}, "#/x-shared/a"),
        ({"$ref": "#/examples/0", "examples": [WRONG]}, "#/examples/0"),
        ({"$ref": "#/default", "default": {"items": WRONG}}, "#/default/items"),
        ({"$ref": "#/enum/0", "enum": [WRONG]}, "#/enum/0"),
        (
            {"items": {"$ref": "#/x-a"}, "x-a": {"not-a": {"$ref": "#/x-b"}}, "x-b": {}},
            "#/x-a",
        ),
        (
            {"$ref": "#/x-a", "x-a": {"items": {"$ref": "#/x-b/~1/0"}}, "x-b": {"/": [WRONG]}},
            "#/x-b/~1/0",
        ),
        ({"$ref": "#/x-a%20b", "x-a b": WRONG}, "#/x-a%20b"),
    ],
    ids=json.dumps,
)
def test_what_is_referred_to_is_checked_wherever_it_is(byte_lm, schema, place):
    with pytest.raises(ConstraintError, match=rf"keyword 'typ'.*\(at {place}\)|keyword 'not-a'"):
        Constraint.from_json_schema(byte_lm, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/x-shared/a", "x-shared": {"a": {"type": "integer"}}},
        {"$ref": "#/x-a", "x-a": {"$ref": "#/examples/0"}, "examples": [{"type": "integer"}]},
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "integer"}}},
        {"$ref": "#a", "$defs": {"b": {"$anchor": "a", "type": "integer"}}},
        {"$ref": "b", "$defs": {"c": {"$id": "b", "type": "integer"}}},
        {"$id": "http://a/b", "$ref": "http://a/b#/$defs/c", "$defs": {"c": {"type": "integer"}}},
        {
            "$ref": "c#/$defs/d",
            "$defs": {
                "c": {"$id": "c", "$defs": {"d": {"$ref": "#/$defs/e"}, "e": {"type": "integer"}}},
                "e": {"type": "string"},
            },
        },
        {"anyOf": [{"$ref": "#/$defs/a"}, False], "$defs": {"a": {"type": "integer"}}},
        {"allOf": [{"$ref": "#/$defs/yes"}, {"type": "integer"}], "$defs": {"yes": True}},
    ],
    ids=json.dumps,
)
def test_references_are_followed_as_the_validator_follows_them(byte_lm, schema):
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
    ],
    ids=json.dumps,
)
def test_references_to_nothing_are_refused(byte_lm, schema):
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
def test_schemas_that_refer_to_themselves_before_a_value_are_refused(byte_lm, schema):
    with pytest.raises(ConstraintError, match=r"at #.* refers to itself"):
        Constraint.from_json_schema(byte_lm, schema)


@pytest.mark.parametrize("shared", [{"type": "integer"}, {"const": 2**60 + 1}], ids=str)
def test_trees_may_refer_to_themselves(byte_lm, shared):
    schema = {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
        "$defs": {"a": shared},
    }
    constraint = Constraint.from_json_schema(byte_lm, schema)
    number = shared.get("const", 7)
    assert byte_model.allows(byte_lm, constraint, f"[{number},[[{number}], []]]")
    assert not byte_model.allows(byte_lm, constraint, f"[{number},[null]]")


def test_every_keyword_is_of_the_drafts_that_the_validators_say():
    assert not HONOURED.keys() & ANNOTATIONS
    assert sorted(DRAFTS) == [4, 6, 7, 2019, 2020]
    for name, keyword in HONOURED.items():
        for draft, (_, validator) in DRAFTS.items():
            is_beside_another = name in ("additionalItems", "exclusiveMinimum", "exclusiveMaximum")
            knows = name in validator.VALIDATORS or is_beside_another
            assert (draft >= keyword.since) == knows, (name, draft)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_keyword_that_the_named_draft_lacks_is_refused(byte_lm, draft):
    uri, _ = DRAFTS[draft]
    values = {"const": 1, "prefixItems": [{}]}
    for name, value in values.items():
        schema = {"$schema": uri, "items": {name: value}}
        if HONOURED[name].since <= draft:
            Constraint.from_json_schema(byte_lm, schema)
            continue
        with pytest.raises(ConstraintError, match=f"no keyword '{name}', which is at #/items"):
            Constraint.from_json_schema(byte_lm, schema)
    beside = {"$schema": uri, "$ref": "#/definitions/a", "minimum": 3, "definitions": {"a": {}}}
    if draft > 7:
        assert not byte_model.allows(byte_lm, Constraint.from_json_schema(byte_lm, beside), "2")
    else:
        with pytest.raises(ConstraintError, match=r"'minimum' beside \$ref at #: put .* allOf"):
            Constraint.from_json_schema(byte_lm, beside)


def test_items_as_a_list_are_those_of_their_drafts(byte_lm):
    schema = {"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}}
    constraint = Constraint.from_json_schema(byte_lm, schema)
    assert byte_model.allows(byte_lm, constraint, "[null, 1]")
    assert not byte_model.allows(byte_lm, constraint, "[null, null]")
    newest = {"prefixItems": [{"type": "null"}], "additionalItems": False, "items": {"const": 1}}
    constraint = Constraint.from_json_schema(byte_lm, newest)
    assert byte_model.allows(byte_lm, constraint, "[null, 1]")
    assert not byte_model.allows(byte_lm, constraint, "[1]")
    with pytest.raises(ConstraintError, match="list of items beside prefixItems"):
        Constraint.from_json_schema(byte_lm, {"prefixItems": [{}], "items": [{}]})


def test_a_schema_that_is_nested_too_deeply_is_refused(byte_lm):
    schema = {"type": "integer"}
    for _ in range(150):
        schema = {"items": schema}
    with pytest.raises(ConstraintError, match="nested more than 100 deep"):
        Constraint.from_json_schema(byte_lm, schema)


@pytest.mark.parametrize("size", [-1, 2.5, "2", True, 2**40])
def test_sizes_are_numbers_of_parts(byte_lm, size):
    with pytest.raises(ConstraintError, match="maxItems at #/items must be an integer"):
        Constraint.from_json_schema(byte_lm, {"items": {"maxItems": size}})
    assert byte_model.allows(byte_lm, Constraint.from_json_schema(byte_lm, {"maxItems": 2.0}), "[]")
