"""Cases of the JSON Schema Test Suite: what is let through is valid, and nearly all that is."""

import json
from pathlib import Path

import pytest

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from tests.generation import byte_model

SUITE = json.loads(Path(__file__).with_name("json_schema_test_suite.json").read_text())
FILES = sorted({group["file"] for group in SUITE["groups"]})

LEFT_OUT = {
    # Keys come in the order in which they are declared.
    "allOf": ['{"foo": "baz", "bar": 2}', '{"foo": "quux", "bar": 2, "baz": null}'],
    # Integers are written without a fraction.
    "const": [
        '{"baz": "bax", "foo": "bar"}', "0.0", "1.0", "-2.0", "9007199254740992.0",
    ],
    "enum": ["0.0", "[0.0]", "1.0", "[1.0]"],
    "type": ["1.0"],
    "float-overflow": ["1e+308"],
    # Formats are kept to, though by the newest draft they need not be.
    "format": [
        '"2962"', '"127.0.0.0.1"', '"12345::"', '"-a-host-name-that-starts-with--"',
        '"06/19/1963"', '"1990-02-31T15:59:60.123-08:00"', '"08:30:06 PST"',
        '"2eb8aa08-aa98-11ea-b4aa-73b441d1638"', '"PT1D"', '"//foo.bar/?baz=qux#quux"',
    ],
    # Characters that ECMA 262 and Python class differently, or that are escaped by number.
    "ecmascript-regex": ['"\\u000b"', '"\ufeff"', '"\\u0001"', '"߀"', '"é"'],
    # Rare spellings of formats, which llguidance's texts do without.
    "date-time": ['"1998-12-31T23:59:60Z"', '"1998-12-31T15:59:60.123-08:00"'],
    "time": [
        '"23:59:60Z"', '"23:59:60+00:00"', '"01:29:60+01:30"', '"23:29:60+23:30"',
        '"15:59:60-08:00"', '"00:29:60-23:30"',
    ],
    "email": [
        '"\\"joe bloggs\\"@example.com"', '"\\"joe..bloggs\\"@example.com"',
        '"\\"joe@bloggs\\"@example.com"', '"joe.bloggs@[IPv6:::1]"',
    ],
    # By drafts before 2019-09, what is beside $ref does not count; it is kept to nevertheless.
    "ref": ['{"foo": [1, 2, 3]}'],
    "hostname": ['"xn--4gbwdl.xn--wgbh1c"'],
    "ipv6": [
        '"1::d6:192.168.0.1"', '"1:2::192.168.0.1"', '"::ffff:192.168.0.1"',
        '"1000:1000:1000:1000:1000:1000:255.255.255.255"',
    ],
}  # fmt: skip
"""Valid texts that no constraint lets through, by the name of the file."""


def made(lm, schema):
    try:
        return Constraint.from_json_schema(lm, schema)
    except ConstraintError:
        return None


@pytest.mark.parametrize("file", FILES)
def test_allowed_texts_of_the_test_suite_are_valid(byte_lm, file):
    for group in SUITE["groups"]:
        if group["file"] != file or (constraint := made(byte_lm, group["schema"])) is None:
            continue
        for value, is_valid in group["cases"]:
            text = json.dumps(value, ensure_ascii=False)
            is_allowed = byte_model.allows(byte_lm, constraint, text)
            assert is_valid or not is_allowed, (group["schema"], text)
            if is_valid and not is_allowed:
                assert text in LEFT_OUT[file.rpartition("/")[2]], (group["schema"], text)


def test_only_known_test_suite_files_are_refused_entirely(byte_lm):
    """Files none of whose schemas can be kept to."""
    kept = {
        group["file"] for group in SUITE["groups"] if made(byte_lm, group["schema"]) is not None
    }
    refused = {file.rpartition("/")[2] for file in set(FILES) - kept}
    assert refused == {
        "defs", "definitions", "dependentRequired", "id", "if-then-else", "not", "propertyNames",
    }  # fmt: skip
