"""Formats of strings are kept to: every date is a date, every address an address."""

import datetime
import ipaddress
import json
import re
import uuid
from pathlib import Path

import jsonschema
import pytest
from pydantic import UUID4, BaseModel, FilePath, SecretStr

from genlm_backend.errors import ConstraintError
from genlm_backend.generation import Constraint
from genlm_backend.generation.grammar.schema_patterns import FORMATS, NATIVE_FORMATS
from tests.generation import byte_model


def is_date(text):
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text)) and has(datetime.date.fromisoformat, text)


def is_time(text):
    """Whether a text is a time of day with a zone; Python knows no leap seconds."""
    form = r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)"
    parts = re.fullmatch(form, text)
    zone = "+00:00" if parts and parts[2] in "zZ" else parts and parts[2]
    return bool(parts) and has(datetime.time.fromisoformat, f"{text[:8]}{zone}")


def is_date_time(text):
    return text[10:11] in ("t", "T") and is_date(text[:10]) and is_time(text[11:])


def is_duration(text):
    """Whether a text is a duration by the grammar of RFC 3339, unit by unit."""
    if re.fullmatch(r"P\d+W", text):
        return True
    date, has_time, time = text[1:].partition("T")
    units = [(date, "YMD"), (time, "HMS")]
    found = ["".join(re.findall(r"[A-Z]", part)) for part, _ in units]
    return (
        text[0] == "P"
        and all(re.fullmatch(r"(\d+[A-Z])*", part) for part, _ in units)
        and all(one in order for one, (_, order) in zip(found, units, strict=True))
        and bool(time if has_time else date)
    )


def is_host_name(text):
    labels = text.split(".")
    form = r"[0-9a-zA-Z-]{1,63}"
    return len(text) <= 253 and all(
        re.fullmatch(form, label) and "-" not in (label[0], label[-1]) for label in labels
    )


def is_mailbox(text):
    name, at, host = text.rpartition("@")
    atoms = name.split(".")
    is_host = is_host_name(host) or (host[:1] + host[-1:] == "[]" and is_ipv4(host[1:-1]))
    allowed = r"[0-9a-zA-Z!#$%&'*+/=?^_`{|}~-]+"
    short = len(name) <= 64 and len(text) <= 254
    return bool(at) and is_host and short and all(re.fullmatch(allowed, atom) for atom in atoms)


def is_uri(text):
    """Whether a text splits as the expression in appendix B of RFC 3986 does, into legal parts."""
    scheme, authority, path, query, fragment = re.fullmatch(
        r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", text, re.S
    ).groups()
    host = (authority or "").rpartition("@")[2]
    if host[:1] == "[":
        address, _, port = host[1:].partition("]")
        is_host = is_ipv6(address) and re.fullmatch(r"(:\d*)?", port)
    else:
        is_host = re.fullmatch(r"([\w.~!$&'()*+,;=-]|%[0-9a-fA-F]{2})*(:\d*)?", host, re.A)
    legal = r"([\w.~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})*"
    return (
        bool(re.fullmatch(r"[a-zA-Z][0-9a-zA-Z+.-]*", scheme or ""))
        and bool(is_host)
        and (authority is None or path[:1] in ("", "/"))
        and (authority is not None or path[:2] != "//")
        and all(re.fullmatch(legal, part or "", re.A) for part in (path, query, fragment))
    )


def is_ipv4(text):
    return has(ipaddress.IPv4Address, text)


def is_ipv6(text):
    return "%" not in text and has(ipaddress.IPv6Address, text)


def is_uuid(text):
    return has(uuid.UUID, text) and str(uuid.UUID(text)) == text.lower()


def is_uuid_of(version):
    return lambda text: is_uuid(text) and uuid.UUID(text).version == version


def has(make, text):
    try:
        make(text)
    except ValueError:
        return False
    return True


CHECKS = {
    "date": is_date, "time": is_time, "date-time": is_date_time, "duration": is_duration,
    "ipv4": is_ipv4, "ipv6": is_ipv6, "hostname": is_host_name, "email": is_mailbox,
    "uri": is_uri, "uuid": is_uuid,
    **{f"uuid{version}": is_uuid_of(version) for version in range(1, 9)},
}  # fmt: skip


def test_every_format_has_a_check_of_its_own():
    assert CHECKS.keys() == {*FORMATS, *NATIVE_FORMATS}


@pytest.mark.parametrize("name", [*FORMATS, *NATIVE_FORMATS])
def test_constrained_texts_of_a_format_are_valid(byte_lm, name):
    constraint = Constraint.from_json_schema(byte_lm, {"type": "string", "format": name})
    for seed in range(100):
        text = byte_model.write(byte_lm, constraint, seed)
        if text is not None:
            assert CHECKS[name](json.loads(text)), text


def test_date_pattern_matches_exactly_the_calendar_days():
    date = re.compile(FORMATS["date"])
    for year in range(10_000):
        for month in (0, 1, 2, 4, 9, 11, 12, 13):
            for day in (0, 1, 9, 10, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert bool(date.fullmatch(text)) == has(datetime.date.fromisoformat, text), text


@pytest.mark.parametrize(
    ("name", "texts"),
    {
        "date": ["2024-02-29", "2000-02-29", "!1900-02-29", "!2023-02-29", "!0000-01-01",
                 "0001-01-01", "9999-12-31", "!2024-2-29", "!2024-04-31"],
        "date-time": ["2024-02-29T23:59:59Z", "2024-02-29t00:00:00.123456789+23:59",
                      "!2023-02-29T00:00:00Z", "!0000-01-01T00:00:00Z", "!2024-02-29T24:00:00Z",
                      "!2024-02-29T00:00:00", "!2024-02-29 00:00:00Z", "!2024-02-29T12:00:60Z"],
        "time": ["12:00:00Z", "!12:00:60Z", "!12:00:00", "!12:60:00Z", "12:00:00.5-08:00"],
        "duration": ["P1Y", "P1Y2M3D", "PT1H", "P1W", "!P", "!PT", "!P1Y1D", "!P1W1D", "!1Y"],
        "ipv4": ["0.0.0.0", "255.255.255.255", "!256.0.0.0", "!01.0.0.0", "!1.1.1", "!1.1.1.1.1"],
        "ipv6": ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::8", "!1::2::3", "!:1", "!1:2:3:4:5:6:7",
                 "!12345::", "!1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7::"],
        "hostname": ["a", "a.b", "a-b.c1", "!-a", "!a-", "!a..b", "!", "!a_b", "!" + "a" * 64,
                     "a" * 63, "!" + ".".join(["a" * 63] * 4)],
        "email": ["a@b", "a.b+c@d.e", "a@[127.0.0.1]", "!a", "!@b", "!a@", "!.a@b", "!a..b@c",
                  "!" + "a" * 65 + "@b", "!a@b@c", "!a@-b"],
        "uri": ["http://a.b/c?d=e#f", "urn:isbn:1", "mailto:a@b", "a:", "http://[::1]:80/", "a:/",
                "!a", "!//a", "!http://a b", "!http://[1]/", "!a:%zz", "!1a:b", "!http://a:b/"],
        "uuid": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2EB8AA08-AA98-11EA-B4AA-73B441D16380",
                 "!2eb8aa08aa9811eab4aa73b441d16380", "!2eb8aa08-aa98-11ea-b4aa-73b441d1638"],
        "uuid1": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "!2eb8aa08-aa98-41ea-b4aa-73b441d16380"],
        "uuid4": ["2eb8aa08-aa98-41ea-b4aa-73b441d16380", "!2eb8aa08-aa98-41ea-c4aa-73b441d16380"],
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_edge_cases_of_a_format_are_allowed_or_refused_correctly(byte_lm, name, texts):
    constraint = Constraint.from_json_schema(byte_lm, {"type": "string", "format": name})
    for text in texts:
        is_wanted, one = text[:1] != "!", text.removeprefix("!")
        assert CHECKS[name](one) == is_wanted, one
        assert byte_model.allows(byte_lm, constraint, json.dumps(one)) == is_wanted, one


def test_format_combines_with_other_keywords(byte_lm):
    schema = {"type": ["string", "integer"], "format": "date", "pattern": "^2", "maxLength": 10}
    schema["allOf"] = [{"pattern": "1$"}]
    constraint = Constraint.from_json_schema(byte_lm, schema)
    texts = ['"2023-02-01"', '"2023-02-02"', '"1023-02-01"', "3"]
    assert [byte_model.allows(byte_lm, constraint, text) for text in texts] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("name", ["dat", "regex", "iri", "url", "ipv4network", "datetime", 5])
def test_unsupported_format_raises_constraint_error(byte_lm, name):
    for schema in ({"type": "string", "format": name}, {"format": name}):
        with pytest.raises(ConstraintError, match="a constraint cannot enforce format") as raised:
            Constraint.from_json_schema(byte_lm, {"items": schema})
        assert f"{name!r} at #/items: " in str(raised.value)
    with pytest.raises(ConstraintError, match="did you mean 'date'"):
        Constraint.from_json_schema(byte_lm, {"format": "dates"})
    Constraint.from_json_schema(byte_lm, {"type": "integer", "format": "int64"})


def test_every_json_schema_format_is_enforced_or_refused(byte_lm):
    checked = {*jsonschema.FormatChecker.checkers, "iri", "uri-template", "json-pointer"}
    for name in checked:
        schema = {"type": "string", "format": name}
        try:
            constraint = Constraint.from_json_schema(byte_lm, schema)
        except ConstraintError:
            continue
        assert name in (*FORMATS, *NATIVE_FORMATS)
        assert not byte_model.allows(byte_lm, constraint, '"{ a"')


class Fields(BaseModel):
    secret: SecretStr
    path: Path
    raw: bytes
    file: FilePath
    key: UUID4


def test_annotation_formats_restrict_nothing(byte_lm):
    constraint = Constraint.from_json_schema(byte_lm, Fields.model_json_schema())
    fields = {"secret": "a", "path": "/b", "raw": "c", "file": "d"}
    fields |= {"key": "2eb8aa08-aa98-41ea-b4aa-73b441d16380"}
    assert byte_model.allows(byte_lm, constraint, json.dumps(fields))
    for name in ("password", "binary", "path"):
        one = Constraint.from_json_schema(byte_lm, {"format": name, "maxLength": 1})
        assert byte_model.allows(byte_lm, one, '"a"')
        assert not byte_model.allows(byte_lm, one, '"ab"')
