"""JSON schemas of pydantic models and adapters, dataclasses and typed dictionaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final

from genlm_backend.errors import ConstraintError, MissingExtraError


def is_class_with_schema(value: Any) -> bool:
    """Return whether a value is a class with typed fields, or a ``pydantic.TypeAdapter``."""
    is_adapter = hasattr(value, "json_schema") and hasattr(value, "validate_json")
    return is_adapter or (isinstance(value, type) and _is_of_fields(value))


def schema_of_class(value: Any) -> dict[str, Any]:
    """Return pydantic's JSON schema of a class, without extra keys unless the class allows them."""
    try:
        import pydantic
    except ImportError as error:
        raise MissingExtraError(
            f"the schema of {value.__name__} needs pydantic: pip install 'genlm-backend[pydantic]'"
        ) from error
    try:
        if hasattr(value, "model_json_schema"):
            schema = value.model_json_schema(schema_generator=_marking_generator())
        else:
            adapter = value if hasattr(value, "json_schema") else pydantic.TypeAdapter(value)
            schema = adapter.json_schema(schema_generator=_marking_generator())
    except (pydantic.errors.PydanticUserError, NameError) as error:
        name = getattr(value, "__name__", value)
        first = str(error).splitlines()[0]
        raise ConstraintError(f"{name} has no JSON schema: {first}") from error
    # Keys that are no fields are allowed only by a class with ``extra="allow"``.
    _close(schema, "#")
    return schema


def _close(schema: Any, pointer: str) -> None:
    """Forbid extra keys where a schema says nothing about them; refuse schemas with ``_MARK``."""
    if isinstance(schema, list):
        for i, part in enumerate(schema):
            _close(part, f"{pointer}/{i}")
    if not isinstance(schema, dict):
        return
    if _MARK in schema:
        raise ConstraintError(
            f"a constraint cannot enforce {schema[_MARK]} at {pointer}, as the JSON schema of this "
            "type allows texts that do not parse: use another type, such as float or a str with a "
            "pattern, or give the field a schema with pydantic.WithJsonSchema"
        )
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs"):
            for name, part in value.items():
                _close(part, f"{pointer}/{keyword}/{name}")
        elif keyword not in ("const", "default", "enum", "examples"):
            _close(value, f"{pointer}/{keyword}")
    if "properties" in schema or schema.get("type") == "object":
        schema.setdefault("additionalProperties", False)


def check_is_no_instance(value: Any) -> None:
    """Raise a ``ConstraintError`` for an instance of a class that has a schema."""
    kind: Any = type(value)
    if not isinstance(value, Mapping) and _is_of_fields(kind):
        raise ConstraintError(
            f"the schema must be a class, got an instance of {kind.__name__}: pass {kind.__name__}"
        )


def _is_of_fields(kind: type) -> bool:
    is_typed_dict = hasattr(kind, "__required_keys__")  # from typing or typing_extensions
    return is_typed_dict or dataclasses.is_dataclass(kind) or hasattr(kind, "model_json_schema")


_MARK: Final = "x-type-with-weaker-schema"

_WEAKER: Final = {
    "complex": "complex", "decimal": "Decimal", "is-subclass": "type[…]", "json": "Json",
    "multi-host-url": "a URL", "url": "a URL",
    "ByteSize._validate": "ByteSize", "EmailStr._validate": "EmailStr",
    "EncodedStr.decode_str": "Base64Str", "NameEmail._validate": "NameEmail",
    "PathType.validate_directory": "DirectoryPath", "PathType.validate_file": "FilePath",
    "PathType.validate_new": "NewPath", "PathType.validate_socket": "SocketPath",
    "PaymentCardNumber.validate": "PaymentCardNumber",
    "apply_known_metadata.<locals>.val_func": "a predicate of annotated_types",
}  # fmt: skip
"""Pydantic's core type or validator → a type that rejects texts which its JSON schema allows."""


@cache
def _marking_generator() -> type[Any]:
    """Return a JSON schema generator that adds ``_MARK`` to schemas wider than their types."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def build_schema_type_to_method(self) -> dict[Any, Callable[[Any], dict[str, Any]]]:
            methods = super().build_schema_type_to_method()
            return {kind: partial(self._marked, method) for kind, method in methods.items()}

        def generate_inner(self, schema: Any) -> dict[str, Any]:
            made, validator = super().generate_inner(schema), _validator(schema)
            if validator == "import_string":  # ``_marked`` is not called for this validator
                return {**made, _MARK: "ImportString"}
            return made

        def _marked(self, method: Callable[[Any], Any], core: dict[str, Any]) -> dict[str, Any]:
            schema = method(core)
            name = _weaker(core, schema, getattr(self, "_config", None))
            return {**schema, _MARK: name} if name else schema

    return Generator


def _weaker(core: dict[str, Any], schema: dict[str, Any], config: Any) -> str | None:
    """Return a core type's name if it rejects texts that its JSON schema allows, else ``None``."""
    kind, bounds = core["type"], {"gt", "ge", "lt", "le"} & core.keys()
    if name := _WEAKER.get(kind) or _WEAKER.get(_validator(core)):
        return name
    if kind in ("date", "datetime", "time", "timedelta"):
        if core.get("now_op") or core.get("tz_constraint", "aware") != "aware":
            return core.get("now_op", "naive").title() + kind.title()
        return f"a {kind} with bounds" if bounds else None
    if kind == "float" and not core.get("allow_inf_nan", getattr(config, "allow_inf_nan", True)):
        return None if len(bounds) == 2 else "FiniteFloat"  # JSON allows 1e999, parsed as infinity
    if kind == "str":
        strips = core.get("strip_whitespace", getattr(config, "str_strip_whitespace", False))
        if strips and {"min_length", "pattern"} & core.keys():
            return "a str whose whitespace is stripped before it is checked"
    key = core.get("keys_schema")
    if key and not {"propertyNames", "patternProperties"} & schema.keys():
        while "schema" in key:
            key = key["schema"]
        kinds = [each["type"] for each in key.get("choices", [key]) if isinstance(each, dict)]
        return None if {"any", "str"} & {*kinds} else f"dict keys of type {key['type']}"
    return None


def _validator(core: Any) -> str:
    """Return the qualified name of a pydantic core schema's validator; ``""`` if it has none."""
    function = core.get("function")
    function = function.get("function") if isinstance(function, dict) else function
    return getattr(getattr(function, "func", function), "__qualname__", "")
