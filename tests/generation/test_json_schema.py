"""A schema's keywords are kept to, or refused; none is passed over."""

import json

import jsonschema
import pytest

from genlm_backend import load_model_by_name
from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint, GenerationConfig, generate
from tests.generation import schemas

pytestmark = pytest.mark.real

WRONG = {"typ": "integer"}
OBJECT = {
    "type": "object",
    "properties": {"typ": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["typ"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def lm():
    with load_model_by_name("smollm2", backend="mock") as lm:
        yield lm


@pytest.mark.parametrize(
    "schema",
    [
        WRONG,
        {"items": WRONG},
        {"items": [WRONG], "type": "array"},
        {"prefixItems": [{}, WRONG]},
        {"additionalItems": WRONG},
        {"properties": {"a": {"properties": {"b": WRONG}}}},
        {"patternProperties": {"^a": WRONG}},
        {"additionalProperties": WRONG},
        {"anyOf": [{"type": "null"}, WRONG]},
        {"oneOf": [WRONG]},
        {"allOf": [WRONG]},
        {"$ref": "#/$defs/a", "$defs": {"a": WRONG}},
        {"$ref": "#/definitions/a", "definitions": {"a": WRONG}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": WRONG},
    ],
    ids=json.dumps,
)
def test_misspelt_keyword_raises_constraint_error_at_any_depth(lm, schema):
    for given in (schema, json.dumps(schema)):
        with pytest.raises(ConstraintError, match=r"keyword 'typ'; did you mean 'type'\?"):
            Constraint.from_json_schema(lm, given)


def test_every_json_schema_keyword_is_enforced_or_refused(lm):
    """Each keyword beside what it would forbid; the validator knows what it means."""
    cases = {  # a keyword → its value, a value that it forbids, and what it says nothing without
        "type": ("integer", '"a"', {}),
        "enum": ([1], "2", {}),
        "const": (1, "2", {}),
        "multipleOf": (3, "4", {"type": "integer"}),
        "maximum": (3, "4", {"type": "integer"}),
        "exclusiveMaximum": (3, "3", {"type": "integer"}),
        "minimum": (3, "2", {"type": "integer"}),
        "exclusiveMinimum": (3, "3", {"type": "integer"}),
        "maxLength": (1, '"ab"', {"type": "string"}),
        "minLength": (2, '"a"', {"type": "string"}),
        "pattern": ("^b$", '"a"', {"type": "string"}),
        "format": ("date", '"a"', {"type": "string"}),
        "items": ({"type": "null"}, "[1]", {"type": "array"}),
        "prefixItems": ([{"type": "null"}], "[1]", {"type": "array"}),
        "maxItems": (0, "[1]", {"type": "array"}),
        "minItems": (2, "[1]", {"type": "array"}),
        "uniqueItems": (True, "[1, 1]", {"type": "array"}),
        "contains": ({"type": "null"}, "[1]", {"type": "array"}),
        "maxProperties": (0, '{"a": 1}', {"type": "object"}),
        "minProperties": (1, "{}", {"type": "object"}),
        "required": (["a"], "{}", {"type": "object"}),
        "properties": ({"a": {"type": "null"}}, '{"a": 1}', {"type": "object"}),
        "patternProperties": ({"^a$": {"type": "null"}}, '{"a": 1}', {"type": "object"}),
        "additionalProperties": (False, '{"a": 1}', {"type": "object"}),
        "propertyNames": ({"pattern": "^b$"}, '{"a": 1}', {"type": "object"}),
        "dependentRequired": ({"a": ["b"]}, '{"a": 1}', {"type": "object"}),
        "dependentSchemas": ({"a": {"required": ["b"]}}, '{"a": 1}', {"type": "object"}),
        "unevaluatedProperties": (False, '{"a": 1}', {"type": "object"}),
        "unevaluatedItems": (False, "[1]", {"type": "array"}),
        "allOf": ([{"type": "null"}], "1", {}),
        "anyOf": ([{"type": "null"}], "1", {}),
        "oneOf": ([{"type": "null"}], "1", {}),
        "not": ({"type": "integer"}, "1", {}),
        "if": ({}, "1", {"then": {"type": "null"}}),
        "$ref": ("#/$defs/a", "1", {"$defs": {"a": {"type": "null"}}}),
        "$dynamicRef": ("#/$defs/a", "1", {"$defs": {"a": {"type": "null"}}}),
    }
    refused = set()
    for keyword, (value, forbidden, beside) in cases.items():
        schema = {keyword: value, **beside}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(
                json.loads(forbidden), schema, format_checker=jsonschema.FormatChecker()
            )
        try:
            constraint = Constraint.from_json_schema(lm, schema)
        except ConstraintError:
            refused.add(keyword)
            continue
        try:
            for token_id in lm.tokenizer.encode(forbidden):
                constraint.advance(token_id)
        except ConstraintError:
            continue
        assert not constraint.can_end, keyword
    assert refused == {
        "uniqueItems", "contains", "dependentRequired", "dependentSchemas",
        "unevaluatedProperties", "unevaluatedItems", "not", "if", "$dynamicRef", "propertyNames",
    }  # fmt: skip


def test_annotations_and_property_names_are_not_read_as_keywords(lm):
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "http://a/b",
        "$comment": "typ", "title": "A", "description": "B with %llguidance", "default": WRONG,
        "examples": [WRONG], "deprecated": True, "readOnly": True, "x-own": WRONG,
        "$defs": {"typ": {"type": "integer", "minimum": 0, "maximum": 9}},
        "type": "object",
        "properties": {"typ": {"$ref": "#/$defs/typ"}, "b": {"enum": [WRONG]}},
        "required": ["typ"],
        "additionalProperties": False,
    }  # fmt: skip
    for seed in range(5):
        text = schemas.write(Constraint.from_json_schema(lm, schema), lm.byte_vocab, seed)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "wrapped",
    [
        OBJECT,
        {"name": "o", "strict": True, "schema": OBJECT},
        {"name": "o", "description": "an object", "schema": OBJECT},
        {"name": "o", "strict": None, "schema": json.dumps(OBJECT)},
    ],
    ids=lambda wrapped: ",".join(wrapped),
)
async def test_openai_style_json_schema_format_is_accepted(lm, wrapped):
    config = GenerationConfig(
        do_sample=True, seed=0, n=3, max_new_tokens=60,
        response_format={"type": "json_schema", "json_schema": wrapped},
    )  # fmt: skip
    for found in await generate(lm, [1], config):
        assert found.finish_reason in ("eos", "stop")
        jsonschema.validate(json.loads(found.text), OBJECT)


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        ({"name": "o", "schema": WRONG}, "'typ'"),
        ({"nmae": "o", "schema": OBJECT}, "'nmae'"),
        ({"name": "o", "strict": True}, "no 'schema'"),
        ({"name": "o", "schema": None}, "object or a boolean, got None"),
        ({"const": {1, 2}}, "is not JSON"),
        ([OBJECT], "object or a boolean"),
    ],
)
def test_malformed_json_schema_format_raises_constraint_error(lm, wrapped, message):
    with pytest.raises(ConstraintError, match=message):
        Constraint.from_response_format(lm, {"type": "json_schema", "json_schema": wrapped})
