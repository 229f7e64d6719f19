"""Options of ``oneOf`` that no value fits at once are let through, and others are refused."""

import json
from typing import Annotated, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from tests.generation import byte_model


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "puppy"]
    name: str


class Bird(BaseModel):
    kind: Literal["bird"] = "bird"
    lives: int


class Fish(BaseModel):
    name: str | None = None
    kind: Literal["fish"] = "fish"


Required = Annotated[Cat | Dog, Field(discriminator="kind")]
Defaulted = Annotated[Bird | Fish, Field(discriminator="kind")]
Nested = Annotated[Required | Defaulted, Field(discriminator="kind")]
PARTS = [
    '"kind":"cat"',
    '"kind":"puppy"',
    '"kind":"bird"',
    '"kind":"fish"',
    '"lives":1',
    '"name":"a"',
]
OBJECTS = ["{}"] + [f"{{{one}}}" for one in PARTS]
OBJECTS += [f"{{{one},{other}}}" for one in PARTS for other in PARTS if one[:5] != other[:5]]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("union", [Required, Defaulted, Nested])
@pytest.mark.parametrize("wrap", ["{}", "[{}]", "null"])
def test_pydantic_discriminated_unions_allow_only_valid_objects(byte_lm, union, mode, wrap):
    kind = {"{}": union, "[{}]": list[union], "null": union | None}[wrap]
    schema = TypeAdapter(kind).json_schema(mode=mode)
    constraint, num_allowed = Constraint.from_json_schema(byte_lm, schema), 0
    texts = [wrap.replace("{}", text) for text in OBJECTS] + (["null"] if wrap == "null" else [])
    for text in texts:
        if byte_model.allows(byte_lm, constraint, text):
            num_allowed += 1
            jsonschema.validate(json.loads(text), schema)
            TypeAdapter(kind).validate_json(text)
    assert num_allowed >= (1 if wrap == "null" else 2)


OPTIONS = [
    {"type": "null"},
    {"type": "string"},
    {"$ref": "#/$defs/text"},
    {"type": "integer", "maximum": 3},
    {"type": "integer", "minimum": 5},
    {"type": "number", "exclusiveMinimum": 3, "maximum": 4.5},
    {"const": 1},
    {"enum": [2, "a", 7]},
    {"allOf": [{"type": "integer"}, {"minimum": 4}]},
    {"anyOf": [{"type": "null"}, {"const": 9}]},
    {"type": "object", "properties": {"k": {"$ref": "#/$defs/one"}}, "required": ["k"]},
    {"type": "object", "properties": {"k": {"const": 2}}},
    {"type": "object", "properties": {"k": False}},
    {"minimum": 8},
    False,
]
TEXTS = ["null", '"a"', '"b"', "1", "2", "3", "3.5", "4", "5", "7", "9", "{}", "[]"]
TEXTS += [f'{{"k":{value}}}' for value in (1, 2, 3)]


@settings(max_examples=200, deadline=None)
@given(options=st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=3))
def test_allowed_text_fits_exactly_one_option_of_one_of(byte_lm, options):
    schema = {"oneOf": options, "$defs": {"text": {"type": "string"}, "one": {"const": 1}}}
    try:
        constraint = Constraint.from_json_schema(byte_lm, schema)
    except ConstraintError:
        return
    for text in TEXTS:
        if byte_model.allows(byte_lm, constraint, text):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ([{"type": "null"}, {"$ref": "#/$defs/text"}], ["null", '"a"', '"b"']),
        ([{"const": 1}, {"const": 2}], ["1", "2"]),
        ([OPTIONS[10], OPTIONS[11]], ['{"k":1}', '{"k":2}']),
    ],
)
def test_disjoint_options_of_one_of_are_accepted(byte_lm, options, texts):
    schema = {"oneOf": options, "$defs": {"text": {"type": "string"}, "one": {"const": 1}}}
    constraint = Constraint.from_json_schema(byte_lm, schema)
    assert [text for text in TEXTS if byte_model.allows(byte_lm, constraint, text)] == texts


def test_overlapping_options_error_names_place_and_suggests_any_of(byte_lm):
    for options in (
        [{"type": "integer"}, {"minimum": 2}], [{"type": "string"}, True], OPTIONS[3:5],
        [OPTIONS[11], OPTIONS[12]],
    ):  # fmt: skip
        with pytest.raises(ConstraintError, match=r"oneOf may overlap at #/items: .*anyOf"):
            Constraint.from_json_schema(byte_lm, {"items": {"oneOf": options}})


def test_one_of_and_any_of_are_enforced_together(byte_lm):
    schema = {
        "oneOf": [{"type": "integer"}, {"type": "null"}],
        "anyOf": [{"type": "string"}, {"type": "null"}],
    }
    constraint = Constraint.from_json_schema(byte_lm, schema)
    assert [text for text in TEXTS if byte_model.allows(byte_lm, constraint, text)] == ["null"]
