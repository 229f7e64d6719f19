"""What a constraint cannot be made of is told in the words of its caller."""

import numpy as np
import pytest
import torch

from genlm_backend import MockAsyncLM
from genlm_backend.errors import ConstraintError, OptionError, OptionTypeError
from genlm_backend.generation import Constraint
from tests.llm.conftest import word_tokenizer
from tests.llm.families import VOCAB

pytest.importorskip("llguidance")

EOS = [0]


@pytest.fixture(scope="module")
def lm():
    with MockAsyncLM(word_tokenizer()) as lm:
        yield lm


def message_of(make, lm, *args, **options):
    with pytest.raises(ConstraintError) as raised:
        make(lm, *args, eos_token_ids=EOS, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"properties": 5}, "properties must be an object"),
        (
            {"properties": {"a": {"type": "string", "pattern": "(a"}}},
            "in the regular expression (a: unclosed group",
        ),
        ({"pattern": "1 | (c", "type": "string"}, "in the regular expression 1 | (c: unclosed"),
        (
            {"properties": {"b": {"enum": [2, 1]}, "a": {"type": "string", "pattern": "(a"}}},
            "in the regular expression (a: unclosed group",
        ),
        ({"type": "a\n   1 | b"}, "Invalid type: a\n   1 | b"),
    ],
    ids=str,
)
def test_schema_error_names_the_fault_without_internal_grammar(lm, schema, fault):
    message = message_of(Constraint.from_json_schema, lm, schema)
    assert message.startswith(f"invalid constraint: {fault}")
    assert not any(word in message for word in ("llguidance", "start:", "%json", "x-guidance"))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "objekt"}, "#"),
        ({"properties": {"a": {"items": {"pattern": "(?=a)b"}}}}, "#/properties/a/items"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"pattern": "("}}}, "#/$defs/a"),
        ({"anyOf": [{"type": "null"}, {"patternProperties": {"^a": {}, "b": {}}}]}, "#/anyOf/1"),
        (
            {"properties": {"b": {"enum": [2]}, "a": {"allOf": [{"type": 5}]}}},
            "#/properties/a/allOf/0",
        ),
        (
            {"type": "array", "items": {"allOf": [{"const": 1}, {"type": "null"}]}, "minItems": 1},
            "#",
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}, "b": {"pattern": "("}}}},
            },
            "#/$defs/a/properties/b",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_schema_error_points_to_the_innermost_faulty_schema(lm, schema, place):
    message = message_of(Constraint.from_json_schema, lm, schema)
    assert message.endswith(f" (at {place})")
    assert "json-schema:" not in message


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(a", "(a: unclosed group"),
        ("a/b[/", "a/b[/: unclosed character class"),
        (r"(a)\1", r"(a)\1: backreferences are not supported"),
        ("   1 | (", "1 | (: unclosed group"),
        ("a\n(b", r"a\n(b: unclosed group"),
    ],
)
def test_pattern_error_names_the_pattern_and_its_fault(lm, pattern, fault):
    message = message_of(Constraint.from_regex, lm, pattern)
    assert message == f"invalid constraint: in the regular expression {fault}"
    of_whitespace = message_of(Constraint.from_json_schema, lm, {}, whitespace=pattern)
    assert fault.rpartition(": ")[2] in of_whitespace
    assert "guidance" not in of_whitespace


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: x", 'at 1(8): unknown name: "x"\n   1 | start: x\n              ^'),
        ('start: "a', '1(10): lexer error\n   1 | start: "a\n                ^'),
        ('begin: "a"', "no start rule found"),
        (
            "\n\nstart: A\nA: B\nB: A\n\n// the end",
            'at 5(4): circular reference in token "A" definition\n'
            "   3 | start: A\n   4 | A: B\n   5 | B: A\n          ^\n   6 | \n   7 | // the end",
        ),
        (
            "start: x\n%llguidance {}",
            'at 1(8): unknown name: "x"\n   1 | start: x\n              ^\n   2 | %llguidance {}',
        ),
        (
            "start: /9 | (/",
            'at 1(8): invalid regex "9 | (" (in regex): regex parse error:\n    9 | (\n        ^\n'
            "error: unclosed group\n   1 | start: /9 | (/\n              ^",
        ),
    ],
)
def test_grammar_error_shows_the_users_grammar_verbatim(lm, grammar, message):
    assert message_of(Constraint.from_grammar, lm, grammar) == f"invalid constraint: {message}"


def test_choice_regex_and_grammar_give_the_same_masks(lm):
    choices = ["<5><6>", "<5>"]
    made = [
        Constraint.from_choice(lm, choices, eos_token_ids=EOS),
        Constraint.from_regex(lm, "<5>(<6>)?", eos_token_ids=EOS),
        Constraint.from_grammar(lm, 'start: "<5>" "<6>"?', eos_token_ids=EOS),
        Constraint.from_grammar(lm, 'start: "<5>" "<6>"? // so', eos_token_ids=EOS),
    ]
    for constraint in made:
        assert constraint.mask().nonzero().flatten().tolist() == [5]
        constraint.advance(5)
        assert constraint.mask().nonzero().flatten().tolist() == [0, 6]


LONE = "a\ud800"


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (Constraint.from_regex, LONE),
        (Constraint.from_grammar, f'start: "{LONE}"'),
        (Constraint.from_choice, ["b", LONE]),
        (Constraint.from_json_schema, {"const": LONE}),
        (Constraint.from_json_schema, '{"const": "\\ud800"}'),
    ],
)
def test_lone_surrogate_raises_constraint_error(lm, make, given):
    message = message_of(make, lm, given)
    assert "\\ud800" in message
    assert "utf-8" in message.lower()


@pytest.mark.parametrize("name", ["row", "mask"])
def test_restrict_with_wrong_row_or_mask_raises_option_error(lm, name):
    constraint = Constraint.from_choice(lm, ["<5>"], eos_token_ids=EOS)
    right = {"row": lm.next_token_logprobs_sync([1]), "mask": constraint.mask()}
    other = {"row": right["mask"], "mask": right["row"]}
    what = {"row": "log-probabilities of all tokens, float", "mask": "the allowed tokens, bool"}
    wanted = rf"{name} must be a tensor of .*{what[name]} \[{VOCAB}\], got "
    for wrong, error in [
        ([1, 2], OptionTypeError),
        (np.zeros(VOCAB, np.float32), OptionTypeError),
        (right[name][:-1], OptionError),
        (right[name][None], OptionError),
        (other[name], OptionError),
    ]:
        with pytest.raises(error, match=wanted):
            constraint.restrict(**{**right, name: wrong})
    allowed, _ = constraint.restrict(**right)
    assert torch.equal(allowed.isfinite(), right["mask"])
