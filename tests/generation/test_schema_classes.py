"""Schemas of classes: what is written is what the class parses, with its own fields alone."""

import builtins
import dataclasses
import enum
import json
import re
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Literal

import annotated_types
import pydantic
import pytest
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    create_model,
)
from typing_extensions import TypedDict

from genlm_backend import generate
from genlm_backend.errors import ConstraintError, GenerationConfigError, MissingExtraError
from genlm_backend.generation import Constraint, GenerationConfig
from tests.generation import byte_model


class City(BaseModel):
    name: Literal["Rome", "Oslo"]
    large: bool = False


@dataclasses.dataclass
class Trip:
    city: City
    days: Literal[1, 2]


class Place(TypedDict):
    properties: bool  # a field that is called as a keyword of schemas is


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: Literal[1]


class Nothing(BaseModel):
    pass


KINDS = [City, Trip, Place, Nothing, TypeAdapter(list[City])]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_constrained_texts_are_parsed_by_their_class(byte_lm, kind):
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    constraint = Constraint.from_json_schema(byte_lm, kind)
    written = {byte_model.write(byte_lm, constraint.fork(), seed) for seed in range(20)}
    for text in written:
        adapter.validate_json(text)
    assert len(written) > 1


@pytest.mark.parametrize(
    ("kind", "text", "is_allowed"),
    [
        (City, '{"name": "Rome"}', True),
        (City, '{"name": "Rome", "large": true}', True),
        (City, '{"name": "Paris"}', False),
        (City, '{"name": "Rome", "more": 1}', False),
        (City, "{}", False),
        (Trip, '{"city": {"name": "Oslo"}, "days": 2}', True),
        (Trip, '{"city": {"name": "Oslo", "more": 1}, "days": 2}', False),
        (Place, '{"properties": true}', True),
        (Place, '{"properties": true, "more": 1}', False),
        (Open, '{"a": 1, "more": 1}', True),
        (Nothing, "{}", True),
        (Nothing, '{"more": 1}', False),
        (TypeAdapter(tuple[bool, Literal[7]]), "[true, 7]", True),
        (TypeAdapter(tuple[bool, Literal[7]]), "[true]", False),
    ],
)
def test_objects_have_the_fields_of_their_class(byte_lm, kind, text, is_allowed):
    for response_format in (kind, {"type": "json_schema", "json_schema": kind}):
        constraint = Constraint.from_response_format(byte_lm, response_format)
        assert byte_model.allows(byte_lm, constraint, text) == is_allowed


async def test_class_as_response_format_generates_a_valid_instance(byte_lm):
    config = GenerationConfig(response_format=City, do_sample=True, seed=3)
    assert config.response_format["json_schema"]["required"] == ["name"]
    (text,) = await generate(byte_lm, "abc", config, max_new_tokens=99)
    City.model_validate_json(text.text)


@dataclasses.dataclass
class Unknown:
    field: "Undefined"  # noqa: F821


class Own:
    pass


@dataclasses.dataclass
class Odd:
    field: Own


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Unknown, "Unknown has no JSON schema"),
        (Odd, "Odd has no JSON schema"),
        (City(name="Rome"), "got an instance of City: pass City"),
        (Trip(City(name="Rome"), 1), "got an instance of Trip: pass Trip"),
        (Own, "is not JSON"),
    ],
)
def test_class_or_object_without_schema_raises_constraint_error(byte_lm, given, said):
    with pytest.raises(ConstraintError, match=said):
        Constraint.from_json_schema(byte_lm, given)


class Color(enum.Enum):
    RED = "red"


_Stripped = Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=1)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((getattr(pydantic, name), name) for name in (
            "NaiveDatetime", "PastDate", "FutureDate", "PastDatetime", "FutureDatetime", "Json",
            "ByteSize", "Base64Str", "FilePath", "DirectoryPath", "NewPath", "ImportString",
            "PaymentCardNumber", "FiniteFloat",
        )),
        *((getattr(pydantic, name), "a URL") for name in ("AnyUrl", "HttpUrl", "PostgresDsn")),
        (Decimal, "Decimal"),
        (complex, "complex"),
        (type[int], r"type\[…\]"),
        (pydantic.Json[int], "Json"),
        (_Stripped, "a str whose whitespace is stripped"),
        (Annotated[date, Field(gt=date(2020, 1, 1))], "a date with bounds"),
        (Annotated[timedelta, Field(lt=timedelta(1))], "a timedelta with bounds"),
        (dict[int, str], "dict keys of type int"),
        (dict[Literal[1, 2], str], "dict keys of type literal"),
        (dict[date, int], "'propertyNames'"),
        (pydantic.Base64Bytes, "format 'base64'"),
        (annotated_types.IsFinite[float], "a predicate"),
        (Annotated[int, annotated_types.Not(bool)], "a predicate"),
        (set[int], "'uniqueItems'; use a list instead of a set"),
    ],
)  # fmt: skip
def test_type_stricter_than_its_schema_raises_error_with_its_place(byte_lm, kind, name):
    outer = create_model("Outer", inner=(create_model("Inner", field=(list[kind], ...)), ...))
    place = r"at #/\$defs/Inner/properties/field/items\b"
    with pytest.raises(ConstraintError, match=f"{name}.*{place}"):
        Constraint.from_json_schema(byte_lm, outer)


@pytest.mark.parametrize(
    ("config", "kind", "name"),
    [
        ({"str_strip_whitespace": True}, Annotated[str, Field(min_length=1)], "is stripped"),
        ({"allow_inf_nan": False}, float, "FiniteFloat"),
    ],
)
def test_model_config_missing_from_the_schema_raises_error(byte_lm, config, kind, name):
    model = create_model("Model", __config__=ConfigDict(**config), field=(kind, ...))
    with pytest.raises(ConstraintError, match=rf"{name}.* at #/properties/field"):
        Constraint.from_json_schema(byte_lm, model)


PARSED = [
    bytes, date, datetime, timedelta, Color, float, dict[str, int],
    dict[int | str, int], pydantic.AwareDatetime, pydantic.SecretStr,
    pydantic.UUID4, Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)],
    Annotated[Decimal, WithJsonSchema({"type": "string", "pattern": "^[1-9]{1,4}$"})],
    Annotated[pydantic.SecretStr, Field(max_length=2)], Annotated[str | None, Field(min_length=3)],
    Annotated[int | str, Field(max_length=2), WithJsonSchema({"type": "string", "maxLength": 2})],
    Annotated[list[int], AfterValidator(list), Field(min_length=2)],
    Annotated[str, Field(pattern=re.compile("^a b$"))],
]  # fmt: skip


@pytest.mark.parametrize("kind", PARSED, ids=str)
def test_constrained_texts_of_each_field_type_are_parsed(byte_lm, kind):
    model = create_model("Model", field=(kind, ...))
    constraint = Constraint.from_json_schema(byte_lm, model)
    for seed in range(20):
        if text := byte_model.write(byte_lm, constraint.fork(), seed):
            model.model_validate_json(text)


def test_instance_as_response_format_raises_error(byte_lm):
    city = City(name="Rome")
    with pytest.raises(ConstraintError, match="pass City"):
        Constraint.from_response_format(byte_lm, city)
    with pytest.raises(GenerationConfigError, match="a class that has a JSON schema, got City"):
        GenerationConfig(response_format=city)


def test_dataclass_schema_without_pydantic_raises_missing_extra_error(byte_lm, monkeypatch):
    real = builtins.__import__

    def without(name, *args):
        if name == "pydantic":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"genlm-backend\[pydantic\]"):
        Constraint.from_json_schema(byte_lm, Trip)
    json.dumps(Constraint.from_json_schema(byte_lm, {"type": "null"}).token_ids)
