r"""Rewrites patterns of JSON schemas for Rust's ``regex``; defines formats by patterns.

A rewritten pattern matches only texts that both ECMA 262 and Python's ``re`` match: ``\d`` becomes
the ASCII digits (ECMA 262), and ``[^\d]`` excludes the digits of all scripts (Python). A wide
pattern, for the keys of objects, matches the texts that at least one of the two matches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from genlm_backend.checks import shown
from genlm_backend.errors import ConstraintError

# Control characters without a short escape. llguidance 1.9 reads a set with all of them as if it
# also had ``"`` and a backslash, so negated sets, ``.`` and ``\p`` exclude them.
_NEVER: Final = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_SPACE: Final = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_FEW: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE, ".": r"\n\r\x{2028}\x{2029}"}
_MANY: Final = {
    "d": r"\p{Nd}", "w": r"_\p{L}\p{N}", "s": _SPACE + r"\x{85}\x{feff}", ".": r"\n",
}  # fmt: skip
_UNWRITABLE = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
    r"|\\(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|\\[av]|\\c|\\0"
)
_PART = re.compile(
    r"\\[pP](?:\{[^}]*\})?|\\[ux]\{[^}]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\."
    r"|\(\?(?:[:=!]|P?<|[^:)]*[:)]?)?|\{[^}]*\}?|\[\^?\]?|&&|--|~~|.",
    re.S,
)
_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_RUST_ALONE = re.compile(r"\\[AzU]|\\[xu]\{.*|\\[pP][^{]?|\(\?(?![:=!<]|P<).*", re.S)


def portable(pattern: str, pointer: str, *, is_wide: bool = False) -> str:
    """Rewrite a pattern to match what ECMA 262 and Python both match or, if wide, either does."""
    written, before = [], ""
    for part, is_inside, is_negated in _parts(pattern):
        letter = part[1:]
        if _is_odd(part, before, is_inside) or (_UNWRITABLE.match(part) and not is_negated):
            raise ConstraintError(
                f"the pattern {shown(pattern)} at {pointer} has {part!r}, which ECMA 262, Python's "
                "re and Rust's regex do not read alike, or which is a control character: write it "
                "another way, such as a{1,3} without a space, ^ and $ for the ends, [aA] for a "
                "letter of either case, (?:…) for a group, or a backslash before a character that "
                "stands for itself"
            )
        before = part
        if part == "[^":
            part = "[^" + _NEVER
        elif part == "." and not is_inside:
            part = f"[^{(_MANY if is_wide else _FEW)['.']}{_NEVER}]"
        elif part == "$" and not is_inside and is_wide:
            part = r"\n?$"
        elif part[0] == "\\" and letter.lower() in ("d", "w", "s"):
            are_many = (is_negated != letter.isupper()) != is_wide
            characters = (_MANY if are_many else _FEW)[letter.lower()]
            part = f"[{'^' + _NEVER if letter.isupper() else ''}{characters}]"
        elif part[:2] in (r"\p", r"\P"):
            part = f"[{part}--[{_NEVER}]]"
        written.append(part)
    return "".join(written)


def _is_odd(part: str, before: str, is_inside: bool) -> bool:
    """Return whether a part of a pattern means something else in another regex dialect."""
    if is_inside:
        return part[0] == "[" or part in ("&&", "--", "~~")
    is_quantifier = bool(_QUANTIFIER.fullmatch(part))
    return (
        bool(_RUST_ALONE.fullmatch(part))
        or part in ("[]", "[^]")
        or (part[0] == "{" and not is_quantifier)
        or (is_quantifier and part != "?" and bool(_QUANTIFIER.fullmatch(before)))
        or (is_quantifier and before in ("^", "$"))
    )


def _parts(pattern: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield each part of a pattern, whether it is in a set (``[…]``), and whether in ``[^…]``."""
    is_inside = is_negated = False
    for match in _PART.finditer(pattern):
        part = match[0]
        if is_inside and part[0] in "({":
            yield from ((each, True, is_negated) for each in part)
            continue
        is_inside = is_inside and part != "]"
        yield part, is_inside, is_negated and is_inside
        if part[0] == "[" and not is_inside:
            is_inside, is_negated = True, part[1:2] == "^"


_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # Python's dates have no year 0
_LEAP_IN_CENTURY = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP_IN_CENTURY}|(?:{_LEAP_IN_CENTURY}|[2468][048])00)"
_DAY = (
    "(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    "|(?:0[13578]|1[02])-31)"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR, _SIXTY = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
# Leap seconds are excluded: Python's ``time`` has none.
_TIME = rf"{_HOUR}:{_SIXTY}:{_SIXTY}(?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR}:{_SIXTY})"
_NUM = "[0-9]{1,6}"  # so that the number fits into a timedelta
_CLOCK = f"{_NUM}H(?:{_NUM}M(?:{_NUM}S)?)?|{_NUM}M(?:{_NUM}S)?|{_NUM}S"
_CALENDAR = f"{_NUM}Y(?:{_NUM}M(?:{_NUM}D)?)?|{_NUM}M(?:{_NUM}D)?|{_NUM}D"
_HEX = "[0-9a-fA-F]"

FORMATS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "duration": f"^P(?:(?:{_CALENDAR})(?:T(?:{_CLOCK}))?|T(?:{_CLOCK})|{_NUM}W)$",
    **{
        f"uuid{version}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-"
        f"{_HEX}{{12}}$"
        for version in range(1, 9)
    },
}
"""Patterns for formats that llguidance lacks or for which it allows texts that do not parse."""

NATIVE_FORMATS: Final = {
    "email": "^[^@]{1,64}@.{1,63}$",
    "hostname": "^.{1,253}$",
    "ipv4": "",
    "ipv6": "",
    "uri": "",
    "uuid": "",
}
"""Formats that llguidance enforces, with patterns for the lengths that it does not check."""
