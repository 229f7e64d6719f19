"""Patterns of JSON schemas match what they match by ECMA 262 and by Python's re."""

import json
import re

import jsonschema
import pytest

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from genlm_backend.generation.grammar.schema_patterns import portable
from tests.generation import byte_model

LETTERS = 'a Z0_-.[]&~^\\"\u0663\xe9\u0301\u3000\ufeff\x85\t\u2028'
# What each stands for by ECMA 262, as Python writes it.
BY_ECMA = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": "\t\n\x0b\x0c\r \xa0\ufeff\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
}


@pytest.mark.parametrize("letter", "dwsDWS")
@pytest.mark.parametrize(
    ("form", "others"),
    [("{}", ""), ("[{}]", ""), ("[^{}]", ""), ("[{}-]", "-"), ("[a{}]", "a"), ("[^a{}]", "a"),
     (r"[^\]{}]", "]")],
)  # fmt: skip
def test_character_class_is_intersection_of_ecma_and_python(byte_lm, letter, form, others):
    pattern = f"^{form.format(chr(92) + letter)}$"
    few = re.compile(f"[{BY_ECMA[letter.lower()]}]")
    constraint = Constraint.from_json_schema(byte_lm, {"type": "string", "pattern": pattern})
    for one in LETTERS:
        is_in = one in others or bool(few.search(one)) != letter.isupper()
        by_ecma, by_python = is_in != form.startswith("[^"), bool(re.search(pattern, one))
        is_allowed = byte_model.allows(byte_lm, constraint, json.dumps(one, ensure_ascii=False))
        assert is_allowed == (by_ecma and by_python), (pattern, one)


@pytest.mark.parametrize(
    ("pattern", "part"),
    [("[a&&b]", "&&"), ("[a-z--b]", "--"), ("[a~~b]", "~~"), ("[[a]b]", "["), ("[^[:alpha:]]", "["),
     ("[]a]", "[]"), ("[^]]", "[^]"), (r"\\[\][x]", "[")],
)  # fmt: skip
def test_rust_only_set_syntax_raises_constraint_error(byte_lm, pattern, part):
    for schema in (
        {"type": "string", "pattern": pattern},
        {"patternProperties": {pattern: {}}, "additionalProperties": False},
    ):
        with pytest.raises(ConstraintError) as raised:
            Constraint.from_json_schema(byte_lm, {"items": schema})
        assert f"at #/items has {part!r}, which ECMA 262, Python's re" in str(raised.value)


@pytest.mark.parametrize(
    "pattern", [r"^a&&b--\[\]]$", r"^[\[\]&-]$", "^[a-z.]{2}|(?:b)+?$", r"\\d", ""]
)
def test_portable_pattern_is_passed_on_unchanged(pattern):
    assert portable(pattern, "#") == pattern


def test_ambiguous_key_pattern_with_other_keys_raises_constraint_error(byte_lm):
    patterns = {r"^\w+$": {"type": "integer"}}
    mixed = {"patternProperties": patterns, "additionalProperties": {"type": "null"}}
    with pytest.raises(ConstraintError, match=r"of keys at #/items differs between regex"):
        Constraint.from_json_schema(byte_lm, {"items": mixed})
    closed = {"patternProperties": patterns, "additionalProperties": False}
    constraint = Constraint.from_json_schema(byte_lm, closed)
    assert byte_model.allows(byte_lm, constraint, '{"a": 1}')
    assert not byte_model.allows(byte_lm, constraint, '{"é": 1}')


@pytest.mark.parametrize(
    ("pattern", "part"),
    [("^a{1, 3}$", "{1, 3}"), ("^a++$", "+"), ("^a?+$", "+"), ("^a{2}+$", "+"), ("^a**$", "*"),
     (r"^\Aa$", r"\A"), (r"^a\z$", r"\z"), (r"^\x{61}$", r"\x{61}"), (r"^\pL$", r"\p"),
     ("(?U)a", "(?U)"), ("(?R)a", "(?R)"), ("^(?s:.)$", "(?s:"), ("a{,3}", "{,3}"),
     ("(?i)a", "(?i)"), ("^(?i:a)$", "(?i:"), (r"^\U00000061$", r"\U"), ("^+a", "+"),
     ("a${0}", "{0}")],
)  # fmt: skip
def test_rust_only_pattern_syntax_raises_constraint_error(byte_lm, pattern, part):
    for schema in (
        {"type": "string", "pattern": pattern},
        {"patternProperties": {pattern: {}}, "additionalProperties": False},
    ):
        with pytest.raises(ConstraintError, match=r"at #/items has .* do not read alike") as raised:
            Constraint.from_json_schema(byte_lm, {"items": schema})
        assert repr(part) in str(raised.value)


CONTROLS = [chr(i) for i in range(32) if chr(i) not in "\b\t\n\f\r"] + ["\x7f"]
SETS = ['[^"]', r"[^\"]", r"[^\\]", r"[^\n\"]", r"[\x00-\x1f]", r"[\x00-!#-~]", r"[\u0000-\u007f]"]
SETS += [
    r"[\v]",
    r"[\vb]",
    r"(?:\v|b)",
    r"b\v?",
    r"(?:\n\v|b)",
    r"(?:\n\0|b)",
    "(?:a\x0b|b)",
    r"[^\w\\]",
]
SETS += [
    r"(?:\x00|[\x01-!])",
    r"[\0-\v]",
    r"(?:a[\x01-\x03]|b)",
    r"[^\v]",
    "[^\x0b-]",
    r"[^\x00\\]",
]


@pytest.mark.parametrize("pattern", SETS)
def test_sets_match_exactly_the_characters_they_name(byte_lm, pattern):
    """Quotes, backslashes and control characters among them."""
    written = f"^(?:{pattern}|xyz)$"
    try:
        constraint = Constraint.from_json_schema(byte_lm, {"type": "string", "pattern": written})
    except ConstraintError:
        return
    texts = ["", *map(chr, range(128)), "é", "a\x0b", "b\x0b", "\n\x0b", "a\x01", "\n", "\n\0"]
    for text in [*texts, "xyz"]:
        is_allowed = byte_model.allows(byte_lm, constraint, json.dumps(text, ensure_ascii=False))
        is_writable = not any(one in CONTROLS for one in text)
        is_in = bool(re.fullmatch(written[1:-1], text))
        assert is_allowed == (is_in and is_writable), text


def test_a_dot_is_no_line_break(byte_lm):
    constraint = Constraint.from_json_schema(byte_lm, {"type": "string", "pattern": "^.$"})
    for one in ("a", "\x85", "\u2027", "é", *"\n\r\u2028\u2029"):
        text = json.dumps(one, ensure_ascii=False)
        assert byte_model.allows(byte_lm, constraint, text) == (one not in "\n\r\u2028\u2029")


KEYS = ["", "a", "b", "c", "ab", "a\n", "b\n", "c\n", "\n", "a\n\n", "ab\n", 'a"', "\\"]


@pytest.mark.parametrize(
    "patterns",
    [["^a$"], ["a$"], ["^a$|^b$"], ["^a$|b"], ["^(a|b)$"], ["^a\\n$"], ["^a$", "^b$"], ["^a$", "b"],
     ["^a$", "^a\n"], ["^a$", "\\n$"], ["^a$", "^a\\n$"], ["^a$", "^(?:a)$"], ['^[^"]*$'],
     ["^(a$|b)"]],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("others", [True, False, {"type": "null"}, {"type": ["integer", "null"]}])
def test_key_patterns_hold_for_ecma_and_python_end_anchors(byte_lm, patterns, others):
    """By ECMA 262 a ``$`` is at the end alone, as ``\\Z`` is by Python."""
    kinds = [{"type": "integer"}, {"type": ["null", "integer"]}]
    given = dict(zip(patterns, kinds, strict=False))
    schemas = [
        {"patternProperties": {name.replace("$", end): kind for name, kind in given.items()},
         "additionalProperties": others}
        for end in ("$", r"\Z")
    ]  # fmt: skip
    try:
        constraint = Constraint.from_json_schema(byte_lm, schemas[0])
    except ConstraintError:
        return
    for name in KEYS:
        for value in (1, None):
            is_valid = all(
                jsonschema.Draft202012Validator(one).is_valid({name: value}) for one in schemas
            )
            text = json.dumps({name: value}, ensure_ascii=False)
            assert is_valid or not byte_model.allows(byte_lm, constraint, text), text


def test_no_key_evades_a_pattern_that_is_read_in_several_ways(byte_lm):
    constraint = Constraint.from_json_schema(
        byte_lm, {"patternProperties": {"^a.$": {"type": "integer"}}}
    )
    assert byte_model.allows(byte_lm, constraint, '{"ab": 1, "b": "x"}')
    for key in ("a\\r", "ab", "ab\\n"):
        assert not byte_model.allows(byte_lm, constraint, f'{{"{key}": "x"}}')
    with pytest.raises(ConstraintError, match="differs between regex"):
        Constraint.from_json_schema(
            byte_lm, {"patternProperties": {"^a$": {}}, "additionalProperties": {"type": "null"}}
        )
    for pattern, name in ((r"^\w$", "é"), ("^a$", "a\n"), ("^.$", "\r")):
        declared = {"properties": {name: {}}, "patternProperties": {pattern: {"type": "integer"}}}
        with pytest.raises(ConstraintError, match="differs between regex"):
            Constraint.from_json_schema(byte_lm, {**declared, "additionalProperties": False})
