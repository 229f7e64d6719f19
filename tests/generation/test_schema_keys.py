"""Keys of objects: none is spelled so that its schema does not hold, and none counts twice."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from genlm_backend.generation.grammar import json_schema
from tests.generation import byte_model

WORDS = ["a", "ab", "\n", "\x01", "\x7f", "é", "😀", 'q"', "\\", "/", "\u2028"]


def spellings(name):
    """Texts of a key: each of its characters as it is, by a short escape, or by number."""
    short = {"\n": "\\n", '"': '\\"', "\\": "\\\\", "/": "\\/"}
    for i, letter in enumerate(name):
        numbers = letter.encode("utf-16-be").hex()
        escape = "".join(f"\\u{numbers[j : j + 4]}" for j in range(0, len(numbers), 4))
        for way in (escape, escape.upper().replace("\\U", "\\u"), short.get(letter, letter)):
            yield f'"{name[:i]}{way}{name[i + 1 :]}"'


SCHEMAS = [
    lambda name: {"properties": {name: {"type": "integer"}}},
    lambda name: {"properties": {name: False}},
    lambda name: {"properties": {"b": {"type": "null"}}, "additionalProperties": {"type": "null"}},
    lambda name: {"patternProperties": {"^" + escaped(name): {"type": "integer"}}},
    lambda name: {"patternProperties": {"^" + escaped(name): False}},
    lambda name: {"allOf": [{"properties": {name: {"type": "integer"}}}, {"required": ["c"]}]},
    lambda name: {"type": "object", "required": [name], "properties": {name: {"type": "integer"}}},
]


def escaped(name):
    return "".join("\\" + letter if letter in '\\/"' else letter for letter in name)


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("make", SCHEMAS)
def test_escaped_spelling_of_a_key_cannot_evade_its_schema(byte_lm, make, name):
    schema = make(name)
    try:
        constraint = Constraint.from_json_schema(byte_lm, schema)
    except ConstraintError:
        return
    for spelled in spellings(name):
        for text in (f'{{{spelled}: "x"}}', f'{{"c": 1, {spelled}: "x"}}', f"{{{spelled}: 1}}"):
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if byte_model.allows(byte_lm, constraint, text):
                jsonschema.validate(value, schema)


@pytest.mark.parametrize("name", WORDS)
def test_key_is_allowed_as_json_dumps_writes_it(byte_lm, name):
    text = json.dumps({name: 1}, ensure_ascii=False)
    for schema in (
        {"properties": {name: {"type": "integer"}}, "additionalProperties": False},
        {"required": [name]},
    ):
        assert byte_model.allows(byte_lm, Constraint.from_json_schema(byte_lm, schema), text)


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=4),
    least=st.integers(0, 3),
    most=st.integers(0, 3),
    required=st.sets(st.sampled_from("ab")),
    others=st.sampled_from([True, False, {"type": "integer", "maximum": 1}]),
)
def test_keys_that_are_written_twice_count_once(byte_lm, pairs, least, most, required, others):
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in sorted(required)},
        "required": sorted(required),
        "minProperties": least,
        "maxProperties": max(least, most),
        "additionalProperties": others,
    }
    try:
        constraint = Constraint.from_json_schema(byte_lm, schema)
    except ConstraintError:
        return
    inner = ", ".join(f'"{name}": {value}' for name, value in pairs)
    text = f"{{{inner}}}"
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    assert is_valid or not byte_model.allows(byte_lm, constraint, text)


def test_unenforceable_min_properties_error_suggests_required(byte_lm):
    for schema in ({"minProperties": 2}, {"minProperties": 3, "required": ["a"]}):
        with pytest.raises(ConstraintError, match=r"minProperties .* at #.* twice.*'required'"):
            Constraint.from_json_schema(byte_lm, schema)
        with pytest.raises(ConstraintError, match=r"minProperties .* at #/items"):
            Constraint.from_json_schema(byte_lm, {"items": schema})
    Constraint.from_json_schema(byte_lm, {"minProperties": 2, "required": ["a"]})


def test_llguidance_release_that_misreads_keys_raises_constraint_error(byte_lm, monkeypatch):
    patterns = {"patternProperties": {"^a": {}}, "additionalProperties": False}
    for schema in (patterns, {"properties": {"a": {}}}):
        Constraint.from_json_schema(byte_lm, {"items": schema})
    monkeypatch.setattr(json_schema, "is_beginning", lambda grammar, text: True)
    for schema in (patterns, {"properties": {"a": {}}}):
        with pytest.raises(ConstraintError, match=r"at #/items: install llguidance 1\.8"):
            Constraint.from_json_schema(byte_lm, {"items": schema})
    Constraint.from_json_schema(
        byte_lm, {"properties": {"a": {}}, "additionalProperties": False, "items": {}}
    )
