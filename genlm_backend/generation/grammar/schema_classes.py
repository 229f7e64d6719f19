"""JSON schemas of classes: pydantic's models and adapters, dataclasses and typed dictionaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from genlm_backend.errors import ConstraintError, MissingExtraError
from genlm_backend.generation.grammar.schema_document import SchemaDocument


def is_class_with_schema(value: Any) -> bool:
    """Return whether a JSON schema is made of a value: of a class, or of pydantic's adapter."""
    is_adapter = hasattr(value, "json_schema") and hasattr(value, "validate_json")
    return is_adapter or (isinstance(value, type) and _is_of_fields(value))


def schema_of_class(value: Any) -> dict[str, Any]:
    """Return the JSON schema of the values that a class parses.

    Objects have the fields of their class and no others, unless the class itself says of others
    what they may be, as pydantic's ``extra="allow"`` does.

    Args:
        value: A class of pydantic, a dataclass, a class of typed dictionaries, or a
            ``pydantic.TypeAdapter`` of any type. All but the first are read by pydantic.

    Raises:
        ConstraintError: (``ValueError``) If it has a field of a type that has no JSON schema.
        MissingExtraError: (``ImportError``) If pydantic is wanted and not installed.
    """
    try:
        import pydantic
    except ImportError as error:
        raise MissingExtraError(
            f"the schema of {value.__name__} is made by pydantic: "
            "pip install 'genlm-backend[pydantic]'"
        ) from error
    try:
        if hasattr(value, "model_json_schema"):
            schema = value.model_json_schema()
        elif hasattr(value, "json_schema"):
            schema = value.json_schema()
        else:
            schema = pydantic.TypeAdapter(value).json_schema()
    except (pydantic.errors.PydanticUserError, NameError) as error:
        name = getattr(value, "__name__", value)
        first = str(error).splitlines()[0]
        raise ConstraintError(f"{name} has no JSON schema: {first}") from error
    for each in SchemaDocument(schema):
        if "properties" in each or each.get("type") == "object":
            each.setdefault("additionalProperties", False)
    return schema


def check_is_no_instance(value: Any) -> None:
    """Raise a ``ConstraintError`` for an object of a class whose schema is wanted."""
    kind: Any = type(value)
    if not isinstance(value, Mapping) and _is_of_fields(kind):
        raise ConstraintError(
            f"a schema is made of a class, and this is an object of {kind.__name__}: "
            f"pass {kind.__name__}"
        )


def _is_of_fields(kind: type) -> bool:
    is_typed_dict = hasattr(kind, "__required_keys__")  # of typing, and of typing_extensions
    return is_typed_dict or dataclasses.is_dataclass(kind) or hasattr(kind, "model_json_schema")
