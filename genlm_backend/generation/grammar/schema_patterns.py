r"""Patterns of JSON schemas, as Rust's ``regex`` has to get them.

Schemas are by ECMA 262, Python's validators read patterns by ``re``, and llguidance by Rust's
``regex``. A pattern is written so that what matches it does by all three: ``\D`` leaves out the
digits of all scripts, as by Python, and ``\d`` is those of ASCII, as by ECMA 262.

Strings are written without control characters, but for those with a short escape. llguidance 1.9
takes a set that has them all to have ``"`` and a backslash too, and passes over one of them that
stands by itself. So no set is handed on with any of them.
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
_NEVER: Final = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_UNWRITABLE = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|\\v|\\0(?![0-9])"
)
_PART = re.compile(
    r"\\[pPux]\{[^}]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\0[0-9]+|\\.|\(\?(?:[:=!]|P?<|[^:)]*[:)]?)?|[.(*+?]|\{[^}]*\}?|\[\^?\]?|\]|&&|--|~~|[^\\\[\]&~.(*+?{-]+|.",
    re.S,
)
_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_RUST_ALONE = re.compile(r"\\[AazU]|\\[xu]\{.*|\\[pP]|\(\?(?![:=!<]|P<).*", re.S)


def portable(pattern: str, pointer: str, dot: str = _DOT, end: str = "$") -> str:
    """Return a pattern as Rust's ``regex`` has to get it."""
    _check_syntax(pattern, pointer)
    found, is_mixed = [], False  # whether these square brackets have what no string has
    for part, is_inside, is_negated in _parts(pattern):
        letter = part[1:]
        if is_inside and (part[0] == "[" or part in ("&&", "--", "~~")):
            raise _ambiguous(pattern, part, pointer)
        if part[0] == "[" and part[-1] == "]":
            raise _ambiguous(pattern, part, pointer)
        if part == "." and not is_inside:
            found.append(dot)
        elif part == "[^":
            found.append("[^" + _NEVER)
        elif part[0] == "\\" and letter.lower() in _FEW:
            characters = (_MANY if is_negated != letter.isupper() else _FEW)[letter.lower()]
            found.append(f"[{'^' + _NEVER if letter.isupper() else ''}{characters}]")
        elif part[:2] in (r"\p", r"\P"):
            found.append(f"[{part}--[{_NEVER}]]")
        elif part == "]" and is_inside:
            found.append(f"&&[^{_NEVER}]]" if is_mixed and not is_negated else part)
            is_mixed = False
        elif is_inside or part[0] == "\\":
            is_mixed |= is_inside and has_unwritable(part)
            part = r"\x00" if part == r"\0" else part
            found.append(part if is_inside else _UNWRITABLE.sub("[a&&b]", part))
        else:
            found.append(_UNWRITABLE.sub("[a&&b]", part).replace("$", end))
    return "".join(found)


def is_read_alike(pattern: str) -> bool:
    """Tell whether all three take a pattern to match the same texts; dots and ends apart."""
    return not any(part[0] == "\\" and part[1:].lower() in _FEW for part, _, _ in _parts(pattern))


def has_dot(pattern: str) -> bool:
    """Tell whether a pattern has a dot, which matches more line breaks by Python."""
    return any(part == "." and not is_inside for part, is_inside, _ in _parts(pattern))


def has_unwritable(text: str) -> bool:
    """Tell whether a text has a control character without a short escape."""
    return bool(_UNWRITABLE.search(text))


def has_end(pattern: str) -> bool:
    """Tell whether a pattern has a ``$``, which by Python stands before a last line break too."""
    return any("$" in part and part[0] != "\\" for part, inside, _ in _parts(pattern) if not inside)


def has_inner_end(pattern: str) -> bool:
    """Tell whether a pattern has a ``$`` elsewhere than at the end of it, or of an alternative."""
    return any(has_end(one.removesuffix("$")) for one in _alternatives(pattern))


def before_line_break(pattern: str) -> str:
    """Return a pattern of what another matches by Python alone: by a ``$`` before a line break."""
    ended = [one for one in _alternatives(pattern) if has_end(one)]
    return "|".join(rf"{one[:-1]}\n$" for one in ended)


def _alternatives(pattern: str) -> list[str]:
    """Return the patterns that a pattern joins by ``|``."""
    found, depth = [""], 0
    for part, is_inside, _ in _parts(pattern):
        is_syntax = not is_inside and part[0] not in "\\["
        for piece in re.split(r"([()|])", part) if is_syntax else [part]:
            depth += is_syntax * (piece.count("(") - piece.count(")"))
            if is_syntax and piece == "|" and depth == 0:
                found.append("")
            else:
                found[-1] += piece
    return found


def _check_syntax(pattern: str, pointer: str) -> None:
    """Refuse what is a quantifier, an escape or a flag by Rust alone, or by it and Python."""
    before = previous = ""  # the quantifier before a part, and the part
    for part, is_inside, _ in _parts(pattern):
        is_quantifier = bool(_QUANTIFIER.fullmatch(part)) and not is_inside
        is_odd = bool(_RUST_ALONE.fullmatch(part)) and (part[0] == "\\" or not is_inside)
        is_odd |= part[0] == "{" and not is_inside and not is_quantifier
        is_odd |= is_quantifier and bool(before) and (part != "?" or before == "lazy")
        is_odd |= is_quantifier and previous[-1:] in ("^", "$") and previous[0] != "\\"
        if is_odd:
            raise ConstraintError(
                f"the pattern {shown(pattern)} at {pointer} has {part!r} where it is not read "
                "alike by ECMA 262, by Python's re and by Rust's regex: write it another way, "
                "such as a{1,3} without a space, ^ and $ for the ends, \\u0061 for a character by "
                "number, [aA] for a letter of either case, "
                "(?:…) for a group, or a backslash before a character that stands for itself"
            )
        before = ("lazy" if before else "quantifier") if is_quantifier else ""
        previous = part


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


def _ambiguous(pattern: str, part: str, pointer: str) -> ConstraintError:
    return ConstraintError(
        f"the pattern {shown(pattern)} at {pointer} has {part!r} in square brackets, which is read "
        "in two ways: write a backslash before each of these characters"
    )
