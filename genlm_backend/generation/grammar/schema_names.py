"""Names of properties: ``propertyNames`` in the words of other keywords of objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.grammar.schema_formats import FORMATS, UNCHECKED
from genlm_backend.generation.grammar.schema_idle import is_anything
from genlm_backend.generation.grammar.schema_keywords import HONOURED
from genlm_backend.generation.grammar.schema_literals import constants
from genlm_backend.generation.grammar.schema_numbers import is_number


def keep_names(
    schema: dict[str, Any], names: dict[str, Any] | bool, types: tuple[str, ...], place: str
) -> None:
    """Write the ``propertyNames`` of a schema as other keywords, in place.

    Args:
        schema: A schema of objects.
        names: The schema of their keys, behind a reference.
        types: The types of values that this one allows.
        place: The place of the schema of objects.

    Raises:
        ConstraintError: (``ValueError``) If it cannot be written so.
    """
    del schema["propertyNames"]
    found = _rules_of_strings(names)
    others = schema.get("additionalProperties", True)
    if names is False or "string" not in types:
        _declare(schema, (), others)
    elif (listed := constants(found)) is not None and found.keys() <= {"const", "enum"}:
        if schema.get("patternProperties"):
            raise _refused(place, "a list of names, beside patternProperties")
        _declare(schema, (name for name in listed if isinstance(name, str)), others)
    elif found:
        pattern = _pattern(found)
        if pattern is None:
            raise _refused(place, f"{_listed(found)} together")
        if schema.get("properties") or schema.get("patternProperties"):
            raise _refused(place, f"{_listed(found)}, beside properties or patternProperties")
        schema |= {"patternProperties": {pattern: others}, "additionalProperties": False}


def _rules_of_strings(names: dict[str, Any] | bool) -> dict[str, Any]:
    """Return the keywords of a schema that rule strings out."""
    if is_anything(names) or isinstance(names, bool):
        return {}
    return {
        name: value
        for name, value in names.items()
        if name in HONOURED
        and name != "type"
        and (not HONOURED[name].types or "string" in HONOURED[name].types)
        and not _fits_all(name, value)
    }


def _fits_all(keyword: str, value: Any) -> bool:
    """Tell whether all strings fit a keyword."""
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS and value not in UNCHECKED
    return (keyword, value) in (("minLength", 0), ("pattern", ""))


def _declare(schema: dict[str, Any], names: Iterable[str], others: Any) -> None:
    """Allow an object some keys alone, in the order in which they are declared, or listed."""
    declared, allowed = schema.get("properties") or {}, dict.fromkeys(names)
    ordered = [*(name for name in declared if name in allowed), *allowed]
    schema["properties"] = {name: declared.get(name, others) for name in ordered}
    schema["additionalProperties"] = False
    schema.pop("patternProperties", None)


def _pattern(found: dict[str, Any]) -> str | None:
    """Return a pattern of the strings that fit a format, a pattern or bounds of their length."""
    if found.keys() == {"pattern"} and isinstance(found["pattern"], str):
        return found["pattern"]
    if found.keys() == {"format"}:
        patterns = FORMATS.get(str(found["format"]), ())
        return f"^(?:{patterns[0]})$" if len(patterns) == 1 else None
    if found.keys() <= {"minLength", "maxLength"} and all(map(is_number, found.values())):
        least, most = int(found.get("minLength", 0)), found.get("maxLength")
        return rf"^[^\x00]{{{least},{'' if most is None else int(most)}}}$"
    return None


def _listed(found: dict[str, Any]) -> str:
    return ", ".join(map(repr, sorted(found)))


def _refused(place: str, fault: str) -> ConstraintError:
    return ConstraintError(
        f"no constraint keeps to propertyNames at {place} with {fault}: give names one 'enum', or "
        "one 'pattern', 'format' or bounds of their length in an object without other properties"
    )
