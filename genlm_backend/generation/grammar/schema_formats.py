"""Formats of strings in JSON schemas, as patterns."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # there is no year 0
_LEAP_IN_CENTURY = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP_IN_CENTURY}|(?:{_LEAP_IN_CENTURY}|[2468][048])00)"
_DAY = (
    "(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    "|(?:0[13578]|1[02])-31)"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR, _SIXTY = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
# A leap second is one at 23:59 of Greenwich alone, and on days that are announced: left out.
_TIME = rf"{_HOUR}:{_SIXTY}:{_SIXTY}(?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR}:{_SIXTY})"

_NUM = "[0-9]{1,6}"  # so that a timedelta has room for it
_CLOCK = f"{_NUM}H(?:{_NUM}M(?:{_NUM}S)?)?|{_NUM}M(?:{_NUM}S)?|{_NUM}S"
_CALENDAR = f"{_NUM}Y(?:{_NUM}M(?:{_NUM}D)?)?|{_NUM}M(?:{_NUM}D)?|{_NUM}D"
_DURATION = f"P(?:(?:{_CALENDAR})(?:T(?:{_CLOCK}))?|T(?:{_CLOCK})|{_NUM}W)"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"
# What stands behind "::" when there are so many groups before it, of at most seven in all.
_SHORTENED = "|".join(
    f"{':'.join([_GROUP] * before)}::(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?"
    if before < 7
    else f"{':'.join([_GROUP] * before)}::"
    for before in range(8)
)
_IPV6 = f"(?:{_GROUP}(?::{_GROUP}){{7}}|{_SHORTENED})"

_ALNUM, _INNER = "[0-9a-zA-Z]", "[0-9a-zA-Z-]"
# Hyphens at the third and fourth place are those of encoded international names.
_LABEL = (
    f"{_ALNUM}(?:{_INNER}{{0,2}}{_ALNUM}"
    f"|{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,58}}{_ALNUM})?"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[0-9a-zA-Z!#$%&'*+/=?^_`{|}~-]+"
# A host of 63 characters at most has no label that is longer, and is far less to compile.
_FREE_LABEL = (
    f"{_ALNUM}(?:{_INNER}{{0,2}}{_ALNUM}|{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}*{_ALNUM})?"
)
_MAILBOX = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_FREE_LABEL}(?:\.{_FREE_LABEL})*|\[{_IPV4}\])"

_UNRESERVED = r"0-9a-zA-Z._\~!$\&'()*+,;=\-"
_ESCAPED = "%[0-9a-fA-F]{2}"
_PATH_CHAR = f"(?:[{_UNRESERVED}:@]|{_ESCAPED})"
_USER = f"(?:(?:[{_UNRESERVED}:]|{_ESCAPED})*@)?"
_HOST = rf"(?:\[(?:{_IPV6})\]|(?:[{_UNRESERVED}]|{_ESCAPED})*)"
_PLACE = (
    f"(?://{_USER}{_HOST}(?::[0-9]*)?(?:/{_PATH_CHAR}*)*|/?(?:{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)?)"
)
_REST = rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
_URI = f"[a-zA-Z][0-9a-zA-Z+.-]*:{_PLACE}{_REST}"

_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_UUIDS = {
    f"uuid{version}": (
        f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}",
    )
    for version in range(1, 9)
}


def _base64(two: str) -> str:
    """Return a pattern of base 64 with padding, in an alphabet that ends with two characters."""
    letter = f"[0-9a-zA-Z{two}]"
    return f"(?:{letter}{{4}})*(?:{letter}{{2}}==|{letter}{{3}}=)?"


FORMATS: Final[dict[str, tuple[str, ...]]] = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}[tT]{_TIME}",),
    "duration": (_DURATION,),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "hostname": (_HOSTNAME, ".{1,253}"),
    "email": (_MAILBOX, "[^@]{1,64}@.{1,63}"),
    "uri": (_URI,),
    "uuid": (_UUID,),
    **_UUIDS,
    "base64": (_base64(r"+\/"),),
    "base64url": (_base64(r"\-_"),),
}
"""The formats that are kept to, each as patterns that a string matches whole, all of them.

By RFC 3339 (dates, times, durations), 2673 and 4291 (addresses), 1123 (host names), 5321
(mailboxes), 3986 (URIs), 9562 (UUIDs) and 4648 (base 64); ``uuid1`` and those behind it are
pydantic's. Some texts that these allow are left out: leap seconds, IPv4 in IPv6, future kinds of
addresses, encoded international names, quoted mailboxes, those at a host of more than 63
characters, and numbers of more than six digits in durations.
"""

UNCHECKED: Final = frozenset({
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex",
    "relative-json-pointer", "uri-reference", "uri-template",  # of JSON Schema
    "color", "host-name", "ip-address", "phone", "style", "utc-millisec",  # of its draft 3
    "ipv4interface", "ipv4network", "ipv6interface", "ipv6network", "ipvanyaddress",
    "ipvanyinterface", "ipvanynetwork", "multi-host-uri", "name-email", "zoneinfo",  # of pydantic
    "ip", "url",
})  # fmt: skip
"""Formats that readers of a schema would take to be checked, and which are not kept to."""

_ANNOTATIONS = frozenset({
    "binary", "byte", "char", "commonmark", "decimal", "decimal128", "directory-path", "double",
    "double-int", "file-path", "float", "html", "int16", "int32", "int64", "int8", "json-string",
    "media-range", "password", "path", "uint16", "uint32", "uint64", "uint8",
})  # fmt: skip
"""Formats of OpenAPI and of pydantic that no text is checked against."""


def likely_format(name: str) -> str | None:
    """Return the format that is kept to and that a name may be misspelt of."""
    if name in FORMATS or name in _ANNOTATIONS:
        return None
    return next(iter(get_close_matches(name, FORMATS, n=1, cutoff=0.66)), None)
