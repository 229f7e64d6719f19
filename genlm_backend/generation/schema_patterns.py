r"""Patterns of JSON schemas, as Rust's ``regex`` has to get them.

Schemas are by ECMA 262, Python's validators read patterns by ``re``, and llguidance by Rust's
``regex``. A pattern is written so that what matches it does by all three: ``\D`` leaves out the
digits of all scripts, as by Python, and ``\d`` is those of ASCII, as by ECMA 262.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from genlm_backend.checks import shown
from genlm_backend.errors import ConstraintError

_SPACE: Final = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_FEW = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_MANY = {"d": r"0-9\p{Nd}", "w": r"_\p{L}\p{N}", "s": _SPACE + r"\x1c-\x1f\x{85}\x{feff}"}
_DOT: Final = r"[^\n\r\x{2028}\x{2029}]"
_PART = re.compile(
    r"\\[pPux]\{[^}]*\}|\\.|\(\?(?:[:=!]|P?<|[^:)]*[:)]?)?|[.(*+?]|\{[^}]*\}?|\[\^?\]?|\]|&&|--|~~|[^\\\[\]&~.(*+?{-]+|.",
    re.S,
)
_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_RUST_ALONE = re.compile(r"\\[Aaz]|\\x\{.*|\\[pP]|\(\?(?![:=!<]|P<|i:).*", re.S)


def portable(pattern: str, place: str, dot: str = _DOT) -> str:
    """Return a pattern as Rust's ``regex`` has to get it.

    Args:
        pattern: A pattern as a schema has it.
        place: The place of the schema.
        dot: What a dot is written as; ``"."`` matches what it does by Python.

    Raises:
        ConstraintError: (``ValueError``) If it has something in square brackets that stands for
            sets of characters by Rust, and for characters otherwise.
    """
    _check_syntax(pattern, place)
    found = []
    for part, is_inside, is_negated in _parts(pattern):
        letter = part[1:]
        if is_inside and (part[0] == "[" or part in ("&&", "--", "~~")):
            raise _ambiguous(pattern, part, place)
        if part[0] == "[" and part[-1] == "]":
            raise _ambiguous(pattern, part, place)
        if part == "." and not is_inside:
            found.append(dot)
            continue
        if part[0] != "\\" or letter.lower() not in _FEW:
            found.append(part)
            continue
        characters = (_MANY if is_negated != letter.isupper() else _FEW)[letter.lower()]
        found.append(f"[{'^' if letter.isupper() else ''}{characters}]")
    return "".join(found)


def is_read_alike(pattern: str) -> bool:
    """Tell whether all three take a pattern to match the same texts; dots and ends apart."""
    return not any(part[0] == "\\" and part[1:].lower() in _FEW for part, _, _ in _parts(pattern))


def has_dot(pattern: str) -> bool:
    """Tell whether a pattern has a dot, which matches more line breaks by Python."""
    return any(part == "." and not is_inside for part, is_inside, _ in _parts(pattern))


def has_end(pattern: str) -> bool:
    """Tell whether a pattern has a ``$``, which by Python stands before a last line break too."""
    return any("$" in part and part[0] != "\\" for part, inside, _ in _parts(pattern) if not inside)


def _check_syntax(pattern: str, place: str) -> None:
    """Refuse what is a quantifier, an escape or a flag by Rust alone, or by it and Python."""
    before = ""  # the quantifier before a part
    for part, is_inside, _ in _parts(pattern):
        is_quantifier = bool(_QUANTIFIER.fullmatch(part)) and not is_inside
        is_odd = bool(_RUST_ALONE.fullmatch(part)) and (part[0] == "\\" or not is_inside)
        is_odd |= part[0] == "{" and not is_inside and not is_quantifier
        is_odd |= is_quantifier and bool(before) and (part != "?" or before == "lazy")
        if is_odd:
            raise ConstraintError(
                f"the pattern {shown(pattern)} at {place} has {part!r} where it is not read alike "
                "by ECMA 262, by Python's re and by Rust's regex: write it another way, such as "
                "a{1,3} without a space, ^ and $ for the ends, \\u0061 for a character by number, "
                "(?:…) for a group, or a backslash before a character that stands for itself"
            )
        before = ("lazy" if before else "quantifier") if is_quantifier else ""


def _parts(pattern: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield the parts of a pattern, whether each is in square brackets, and in negated ones."""
    is_inside = is_negated = False
    for found in _PART.finditer(pattern):
        part = found[0]
        yield part, is_inside, is_negated
        if part[0] == "[" and not is_inside:
            is_inside, is_negated = True, part[1:2] == "^"
        elif part == "]":
            is_inside = is_negated = False


def _ambiguous(pattern: str, part: str, place: str) -> ConstraintError:
    return ConstraintError(
        f"the pattern {shown(pattern)} at {place} has {part!r} in square brackets, which is read "
        "in two ways: write a backslash before each of these characters"
    )
