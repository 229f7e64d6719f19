"""What a constraint lets through is in the language, and all that is in it is let through."""

import copy
import json
import math
import pickle
import random
import re

import jsonschema
import numpy as np
import pytest
import torch

from genlm_backend import MockAsyncLM, load_model_by_name
from genlm_backend.errors import (
    ConstraintError,
    ConstraintViolation,
    GenlmBackendError,
    NotPicklableError,
    OptionError,
    OptionTypeError,
)
from genlm_backend.generation import Constraint
from genlm_backend.readouts.draw import PackedMask, packed_mask
from tests.generation import schemas
from tests.llm.conftest import word_tokenizer

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def lm():
    """The bundled model's real vocabulary; nothing here needs its weights."""
    with load_model_by_name("smollm2", backend="mock") as lm:
        yield lm


@pytest.mark.parametrize("part", range(4))
def test_every_text_of_a_random_schema_validates(lm, part):
    for seed in range(50 * part, 50 * part + 50):
        schema = schemas.random_schema(random.Random(seed))
        jsonschema.Draft202012Validator.check_schema(schema)
        text = schemas.write(Constraint.from_json_schema(lm, schema), lm.byte_vocab, seed)
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{text!r} for {schema}") from error


# In the manner of the examples that the JSON Schema site and its drafts are explained by.
WELL_KNOWN = {
    "person": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "firstName": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        },
        "required": ["firstName", "age"],
        "additionalProperties": False,
    },
    "product with a definition": {
        "$defs": {"size": {"type": "number", "exclusiveMinimum": 0, "maximum": 99}},
        "type": "object",
        "properties": {
            "productId": {"type": "integer", "minimum": 1, "maximum": 999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
            "width": {"$ref": "#/$defs/size"},
        },
        "required": ["productId", "width"],
        "additionalProperties": False,
    },
    "one of two": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"],
             "additionalProperties": False},
            {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"],
             "additionalProperties": False},
        ]
    },
    "a tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "a date": {"type": "string", "format": "date"},
    "a tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["NW", "SE"]}],
        "items": False,
        "minItems": 2,
    },
    "anything": {"type": "object", "maxProperties": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_every_text_of_a_well_known_schema_validates(lm, name):
    schema = WELL_KNOWN[name]
    if name == "anything":
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    checker = jsonschema.FormatChecker()
    for seed in range(15):
        text = schemas.write(
            Constraint.from_json_schema(lm, json.dumps(schema)), lm.byte_vocab, seed
        )
        jsonschema.validate(json.loads(text), schema, format_checker=checker)


@pytest.mark.parametrize(
    "choices",
    [
        ["hello", "help", "he", "world"],
        ["größe", "größer", "日本語", "日本"],
        ['a "quoted" one', "a\\backslash", "a/b"],
    ],
)
def test_mask_allows_exactly_the_tokens_that_continue_or_end_a_choice(lm, choices):
    wanted = [choice.encode() for choice in choices]
    randomness = random.Random(0)
    special = lm.special_ids | lm.undefined_ids
    for _ in range(12):
        constraint, text = Constraint.from_choice(lm, choices), b""
        while not constraint.is_ended:
            mask = constraint.mask()
            expected = {
                i
                for i, token in enumerate(lm.byte_vocab)
                if i not in special and any(w.startswith(text + token.byte_string) for w in wanted)
            }
            if text in wanted:
                expected.add(lm.tokenizer.eos_token_id)
            assert constraint.can_end == (text in wanted)
            assert set(mask.nonzero().flatten().tolist()) == expected
            chosen = randomness.choice(sorted(expected))
            constraint.advance(chosen)
            if chosen == lm.tokenizer.eos_token_id:
                break
            text += lm.byte_vocab[chosen].byte_string
        assert text in wanted


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-\d+", r"(ab|cd)*e", r"a/b\.c?", r"[α-ω]+!"])
def test_texts_of_a_pattern_match_it(lm, pattern):
    for seed in range(10):
        text = schemas.write(Constraint.from_regex(lm, pattern), lm.byte_vocab, seed).decode()
        assert re.fullmatch(pattern, text)


def test_texts_of_a_recursive_grammar_have_balanced_brackets(lm):
    grammar = 'start: "(" start ")" | "x"'
    for seed in range(20):
        constraint = Constraint.from_grammar(lm, grammar)
        text = schemas.write(constraint, lm.byte_vocab, seed)
        depth = text.index(b"x")
        assert text == b"(" * depth + b"x" + b")" * depth


def test_forked_constraints_advance_independently(lm):
    first = Constraint.from_choice(lm, ["abc", "abd", "xyz"])
    (a,) = (i for i, t in enumerate(lm.byte_vocab) if t.byte_string == b"ab")
    (x,) = (i for i, t in enumerate(lm.byte_vocab) if t.byte_string == b"x")
    second = first.fork()
    first.advance(a)
    second.advance(x)
    third = first.fork()
    assert (first.token_ids, second.token_ids, third.token_ids) == ([a], [x], [a])
    assert torch.equal(first.mask(), third.mask())
    assert not (first.mask() & second.mask()).any()


def test_disallowed_token_raises_violation_and_changes_no_state(lm):
    constraint = Constraint.from_choice(lm, ["yes", "no"])
    before = constraint.mask()
    eos = lm.tokenizer.eos_token_id
    for wrong in (lm.tokenizer.encode("maybe")[0], eos, -1, len(lm.byte_vocab), 0):
        with pytest.raises(ConstraintViolation, match=r"not allowed here|cannot end here"):
            constraint.advance(wrong)
        assert torch.equal(constraint.mask(), before)
    constraint.advance(lm.tokenizer.encode("yes")[0])
    assert constraint.can_end
    assert constraint.must_end
    assert constraint.mask().nonzero().flatten().tolist() == [eos]
    constraint.advance(eos)
    assert not constraint.mask().any()
    assert not constraint.can_end
    with pytest.raises(ConstraintViolation):
        constraint.advance(eos)


def test_restrict_returns_renormalised_row_and_log_mass(lm):
    constraint = Constraint.from_choice(lm, ["yes", "no"])
    row = lm.next_token_logprobs_sync([1, 2, 3])
    before = row.clone()
    allowed, log_mass = constraint.restrict(row)
    assert torch.equal(row, before)
    mask = constraint.mask()
    assert log_mass == pytest.approx(float(row.exp()[mask].sum().log()), abs=1e-5)
    torch.testing.assert_close(allowed[mask], row[mask] - log_mass)
    assert (allowed[~mask] == -torch.inf).all()


def test_log_mass_is_never_positive_and_zero_for_a_full_mask(lm):
    constraint, everything = Constraint.from_regex(lm, "a*"), torch.ones(len(lm.byte_vocab)).bool()
    weights = []
    for i in range(40):
        row = lm.next_token_logprobs_sync([1, i])
        allowed, log_mass = constraint.restrict(row, everything)
        assert log_mass == 0
        torch.testing.assert_close(allowed, row, rtol=0, atol=1e-5)
        all_but_one = everything.clone()
        all_but_one[int(row.argmin())] = False
        weights.append(constraint.restrict(row, all_but_one)[1])
        assert weights[-1] <= 0
        halved = row.masked_fill(torch.arange(len(row)) % 2 == 0, -torch.inf)
        expected = float(halved.double().logsumexp(0))
        assert constraint.restrict(halved, everything)[1] == pytest.approx(expected, abs=1e-6)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            restricted, log_mass = constraint.restrict(row.to(dtype), everything)
            assert restricted.dtype is dtype
            assert log_mass <= 0
    assert min(weights) < 0


def test_row_without_mass_on_allowed_tokens_has_log_mass_minus_inf(lm):
    constraint = Constraint.from_choice(lm, ["yes"])
    row = lm.next_token_logprobs_sync([1]).masked_fill(constraint.mask(), -torch.inf)
    allowed, log_mass = constraint.restrict(row.log_softmax(-1))
    assert log_mass == -math.inf
    assert (allowed == -torch.inf).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda lm: Constraint.from_json_schema(lm, {"type": "objekt"}), "objekt"),
        (lambda lm: Constraint.from_json_schema(lm, '{"type": '), "is not JSON"),
        (lambda lm: Constraint.from_json_schema(lm, 3), "object or a boolean"),
        (lambda lm: Constraint.from_regex(lm, "(a"), "unclosed group"),
        (lambda lm: Constraint.from_choice(lm, []), "at least one text"),
        (lambda lm: Constraint.from_choice(lm, ["a", ""]), "non-empty texts"),
        (lambda lm: Constraint.from_grammar(lm, 'begin: "a"'), "start"),
        (lambda lm: Constraint.from_regex(lm, "a", eos_token_ids=[99_999]), "99999"),
        (lambda lm: Constraint.from_response_format(lm, {"type": "xml"}), "'json_object'"),
        (lambda lm: Constraint.from_response_format(lm, {"type": "regex"}), "'regex'"),
    ],
)
def test_invalid_constraint_raises_constraint_error(lm, make, message):
    with pytest.raises(ConstraintError, match=message):
        make(lm)


def test_each_response_format_makes_its_constraint(lm):
    for response_format, text in (
        ({"type": "json_object"}, b"{}"),
        ({"type": "json_schema", "json_schema": {"const": 1}}, b"1"),
        ({"type": "regex", "regex": "a{3}"}, b"aaa"),
        ({"type": "choice", "choice": ["b"]}, b"b"),
        ({"type": "grammar", "grammar": 'start: "c"'}, b"c"),
    ):
        constraint = Constraint.from_response_format(lm, response_format)
        for token_id in lm.tokenizer.encode(text.decode()):
            constraint.advance(token_id)
        assert constraint.can_end


def test_tokenizer_without_eos_needs_explicit_eos_token_ids():
    with MockAsyncLM(word_tokenizer()) as lm:
        with pytest.raises(ConstraintError, match="pass some as eos_token_ids"):
            Constraint.from_choice(lm, ["<5>"])
        constraint = Constraint.from_choice(lm, ["<5><6>", "<5>"], eos_token_ids=[0, 1])
        constraint.advance(5)
        assert constraint.mask().nonzero().flatten().tolist() == [0, 1, 6]


def test_missing_llguidance_raises_import_error_that_names_the_extra(lm, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"genlm-backend\[grammar\]"):
        Constraint.from_choice(lm, ["a"])


def test_masks_of_ten_thousand_choices_match_the_choices(lm):
    """Each mask against the choices themselves, along paths to some of them."""
    randomness = random.Random(0)
    words = [t.byte_string.decode() for t in lm.byte_vocab if t.byte_string.isalpha()]
    choices = list(
        {" ".join(randomness.sample(words, randomness.randint(1, 5))) for _ in range(10_050)}
    )
    choices += [choice[:5] for choice in choices[:200]] + [
        "a\nb",
        "tab\t",
        "%llguidance",
        "🐶🐱",
        "\0",
    ]
    wanted = sorted({choice.encode() for choice in choices})
    assert len(wanted) > 10_000
    special = lm.special_ids | lm.undefined_ids
    constraint = Constraint.from_choice(lm, choices)
    for choice in [*randomness.sample(choices, 4), *choices[-5:]]:
        going, text = constraint.fork(), b""
        for token_id in lm.tokenizer.encode(choice):
            rests = [w[len(text) :] for w in wanted if w.startswith(text)]
            beginnings = {rest[:size] for rest in rests for size in range(1, len(rest) + 1)}
            expected = {
                i
                for i, token in enumerate(lm.byte_vocab)
                if i not in special and token.byte_string in beginnings
            }
            if text in wanted:
                expected.add(lm.tokenizer.eos_token_id)
            assert set(going.mask().nonzero().flatten().tolist()) == expected
            going.advance(token_id)
            text += lm.byte_vocab[token_id].byte_string
        assert text == choice.encode()
        assert going.can_end


@pytest.mark.parametrize("choices", ["yes", b"yes", 5, None], ids=repr)
def test_choices_that_are_no_list_raise_type_error(lm, choices):
    with pytest.raises(TypeError, match=r"a list of texts, got (b?'yes'|5|None)"):
        Constraint.from_choice(lm, choices)
    with pytest.raises(GenlmBackendError, match="a list of texts"):
        Constraint.from_response_format(lm, {"type": "choice", "choice": choices})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, Constraint.fork])
def test_copied_constraints_are_independent_and_pickling_is_refused(copied):
    with MockAsyncLM(word_tokenizer()) as lm:
        text = (lm.byte_vocab[5].byte_string * 2).decode()
        first = Constraint.from_choice(lm, [text], eos_token_ids=[0])
        second = copied(first)
        second.advance(5)
        assert (first.token_ids, second.token_ids) == ([], [5])
        second.advance(5)
        first.advance(5)
        assert (first.must_end, second.must_end) == (False, True)
        with pytest.raises(NotPicklableError, match=r"fork\(\)"):
            pickle.dumps(first)


@pytest.mark.parametrize("wrong", ["logits", "probabilities"])
def test_restrict_of_logits_or_probabilities_raises_option_error(wrong):
    with MockAsyncLM(word_tokenizer()) as lm:
        constraint = Constraint.from_regex(lm, "(?s).*", eos_token_ids=[0])
        row = lm.next_token_logprobs_sync([1, 2])
        with pytest.raises(OptionError, match="must be log-probabilities"):
            constraint.restrict(row + 9 if wrong == "logits" else row.exp())
        for precision in (torch.float16, torch.bfloat16):
            assert constraint.restrict(row.to(precision))[1] <= 0


# ---------------------------------------------------------------- many at once


def test_masks_of_many_constraints_equal_their_single_masks(lm):
    """Of several vocabularies and grammars, wherever their texts are."""
    generator, small = random.Random(0), MockAsyncLM(word_tokenizer())
    made = [
        Constraint.from_json_schema(lm, WELL_KNOWN["person"]),
        Constraint.from_regex(lm, "[a-c]{0,4}"),
        Constraint.from_regex(small, ".{0,5}", eos_token_ids=[1]),
    ]
    constraints = [generator.choice(made).fork() for _ in range(40)]
    for _ in range(8):
        asked = [*constraints, constraints[0]]
        for may_end in (True, False):
            masks = Constraint.masks(asked, may_end=may_end)
            for constraint, mask in zip(asked, masks, strict=True):
                expected = constraint.mask(may_end=may_end)
                assert torch.equal(mask.unpacked(), expected)
                size = len(expected)
                assert mask == PackedMask(np.packbits(expected.numpy()).tobytes(), size)
                if expected.any():
                    assert packed_mask(mask, size) == packed_mask(expected, size)
        for constraint in constraints:
            ids = constraint.mask().nonzero()[:, 0].tolist()
            if ids:
                constraint.advance(generator.choice(ids))
    assert any(constraint.is_ended for constraint in constraints)
    assert Constraint.masks([]) == []
    small.close()


async def test_draw_with_a_packed_mask_equals_draw_with_a_bool_mask(lm):
    constraint = Constraint.from_json_schema(lm, WELL_KNOWN["person"])
    (mask,) = Constraint.masks([constraint])
    draws = [
        await lm.draw_next_token(
            [1, 2, 3], allowed=allowed, generator=np.random.default_rng(seed), temperature=heat
        )
        for heat in (0, 0.7, 1)
        for seed in range(5)
        for allowed in (mask, constraint.mask())
    ]
    assert draws[::2] == draws[1::2]
    (nothing,) = Constraint.masks([_ended(lm)])
    assert not nothing.unpacked().any()
    with pytest.raises(OptionError, match="no token"):
        await lm.draw_next_token([1], allowed=nothing)
    draw = await lm.draw_next_token([1], allowed=nothing, impossible="return")
    assert draw.token_id == -1
    with MockAsyncLM(word_tokenizer()) as small, pytest.raises(OptionError, match="a mask of"):
        await small.draw_next_token([1], allowed=mask)
    with pytest.raises(OptionError, match="in 3 bytes"):
        await lm.draw_next_token([1], allowed=PackedMask(b"abc", len(lm.byte_vocab)))


def _ended(lm):
    constraint = Constraint.from_choice(lm, ["a"])
    for ids in (lm.tokenizer.encode("a"), sorted(lm.eos_token_ids)[:1]):
        for token_id in ids:
            constraint.advance(token_id)
    return constraint


def test_restrict_with_a_packed_mask_equals_restrict_without(lm):
    constraint = Constraint.from_choice(lm, ["a", "b"])
    (mask,) = Constraint.masks([constraint])
    row = lm.next_token_logprobs_sync([1, 2])
    found, weight = constraint.restrict(row, mask)
    expected, own = constraint.restrict(row)
    assert torch.equal(found, expected)
    assert weight == own
    assert len(repr(mask)) < 60


def test_wrong_mask_arguments_raise_option_type_error(lm):
    with pytest.raises(OptionTypeError, match="constraints"):
        Constraint.masks(Constraint.from_json_object(lm))
    with pytest.raises(OptionTypeError, match=r"constraints\[1\]"):
        Constraint.masks([Constraint.from_json_object(lm), None])
    with pytest.raises(OptionTypeError, match="is a constraint, not a mask: pass"):
        lm.draw_next_token_sync([1], allowed=Constraint.from_json_object(lm))
    with pytest.raises(OptionTypeError, match="list of bools"):
        lm.draw_next_token_sync([1], allowed=[True, False])
    with pytest.raises(ConstraintViolation, match="has ended"):
        _ended(lm).advance(2)


@pytest.mark.parametrize("name", ["json_schema", "regex", "choice", "grammar", "response_format"])
def test_swapped_model_argument_raises_constraint_error(lm, name):
    with pytest.raises(ConstraintError, match="lm must be an AsyncLM, got 'a'"):
        getattr(Constraint, f"from_{name}")("a", lm)
