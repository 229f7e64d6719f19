"""Numbers, constants and bounds of JSON schemas: those that llguidance keeps to, and the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from decimal import ROUND_DOWN, Context, Decimal
from math import ceil, floor, gcd, lcm, prod
from typing import Any, TypeGuard

from genlm_backend.generation.grammar.schema_keywords import types_of

_MOST = 2**53
_MOST_EXPONENT = 22  # the largest power of ten that a double holds exactly
_MOST_FACTOR = 2**32
_MOST_STATES, _MOST_ROUND, _MOST_OF_TENS = 100_000, 10**8, 100
_PLACES = 16  # digits of a number that is no integer, and at most 2**53 without its point


def is_number(value: Any) -> TypeGuard[int | Decimal]:
    """Tell whether a value of plain JSON is a number."""
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def is_exact(number: int | Decimal) -> bool:
    """Tell whether llguidance reads a number as it is written.

    It reads integers and fractions alike into doubles, rounding once for the digits and once for
    the exponent. So the digits and the power of ten have to be doubles. It adds one to a bound
    that is not included, which has to leave a double too.
    """
    if isinstance(number, int):
        return abs(number) < _MOST
    digits, exponent = _parts(number)
    if max(abs(digits), abs(number)) >= _MOST or abs(exponent) > _MOST_EXPONENT:
        return False
    return Decimal(repr(float(number))) == number


def spellings(number: int | Decimal) -> list[str]:
    """Return the texts of a number: as ``json`` writes it, and without an exponent."""
    if isinstance(number, int):
        return [str(number)]
    digits, exponent = _parts(number)
    plain = f"{number:f}" if abs(exponent) <= 400 else f"{digits}e{exponent}"
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    double = float(number)
    is_double = abs(double) <= 1.7976931348623157e308 and Decimal(repr(double)) == number
    return sorted({plain, json.dumps(double)} if is_double else {plain}, key=len)


def factor_of(divisor: int | Decimal) -> tuple[int, int] | None:
    """Return the factor of a ``multipleOf`` for llguidance: n and e of n · 10⁻ᵉ, if it is that.

    Its own arithmetic is followed, which multiplies a double by ten until it has no fraction:
    0.07 becomes 0.7000000000000001.
    """
    if divisor <= 0 or not is_exact(divisor):
        return None
    value, exponent = float(divisor), 0
    while value % 1 and value < _MOST_FACTOR:
        value, exponent = value * 10, exponent + 1
    if value % 1 or value >= _MOST_FACTOR or Decimal(int(value)).scaleb(-exponent) != divisor:
        return None
    return int(value), exponent


def divisors(number: int, exponent: int) -> list[Decimal]:
    """Return a ``multipleOf`` for each number of digits that its multiples may have behind a point.

    llguidance lets a fraction through with as many digits as its divisor has, and no other: of
    0.25, only 0.5 lets 0.5 through. Those with n digits are the multiples of the least number with
    n digits that is one.
    """
    return [
        Decimal(number // gcd(number, 10 ** (exponent - num_digits))).scaleb(-num_digits)
        for num_digits in range(exponent, 0, -1)
    ] or [Decimal(number)]


def shortened(bound: int | Decimal) -> list[Decimal]:
    """Return a bound with fewer digits behind the point, rounded towards 0: 0.12 and 0.1 of 0.125.

    llguidance lets these through by none of its bounds; those without a fraction it does.
    """
    _, exponent = _parts(Decimal(bound))
    return [Decimal(bound).quantize(Decimal(1).scaleb(-n), ROUND_DOWN) for n in range(1, -exponent)]


def beside(bound: int | Decimal, step: int) -> Decimal:
    """Return a number next to an integer, as far from it as its digits leave room in a double."""
    places = _PLACES - len(str(abs(int(bound))))
    return Decimal(int(bound)) + Decimal(step).scaleb(-max(0, places))


def is_quickly_built(divisor: int) -> bool:
    """Tell whether an automaton of the multiples of an integer is made in less than a second or so.

    llguidance looks through the remainders, of which there are as many as the integer: 99,991 took
    it 0.5 s, 531,441 took 6 s, and 2**31 was not done in a quarter of an hour. It is quick with few
    tens, hundreds or so: below 100 of them no number up to 10**8 took more than 0.6 s.
    """
    tens = str(divisor).rstrip("0")
    is_round = divisor <= _MOST_ROUND and len(tens) > 0 and int(tens) < _MOST_OF_TENS
    return divisor <= _MOST_STATES or is_round


def have_common_multiple(factors: Iterable[tuple[int, int]]) -> bool:
    """Tell whether llguidance can require several ``multipleOf`` of one number.

    It multiplies two of them before it divides, and takes what 32 bits leave of that; and the
    automaton of the common multiple has to be made.
    """
    found = set(factors)
    most = max((exponent for _, exponent in found), default=0)
    scaled = [  # a multiple of each of ``divisors``
        lcm(number, 10 ** max(0, exponent - 1)) * 10 ** (most - exponent)
        for number, exponent in found
    ]
    return prod(scaled) < _MOST_FACTOR and is_quickly_built(lcm(*scaled))


def integers_within(low: int | None, high: int | None) -> str:
    """Return a pattern of the integers between two bounds, both included; ``None`` for no bound."""
    parts = []
    if low is None or low < 0:
        parts += ["-" + part for part in _natural(max(1, -(high or 0)), _negated(low))]
    if high is None or high >= 0:
        parts += _natural(max(0, low or 0), high)
    return "|".join(parts)


def _negated(number: int | None) -> int | None:
    return None if number is None else -number


def _natural(low: int, high: int | None) -> Iterator[str]:
    """Yield patterns of the numbers from ``low``, which is not negative, up to ``high``."""
    first, last = str(low), "" if high is None else str(high)
    for size in range(len(first), (len(last) or len(first)) + 1):
        least = first if size == len(first) else "1" + "0" * (size - 1)
        most = last if size == len(last) else "9" * size
        if least <= most:
            yield _digits(least, most)
    if high is None:
        yield f"[1-9][0-9]{{{len(first)},}}"


def _digits(least: str, most: str) -> str:
    """Return a pattern of the numbers between two that have as many digits."""
    size = len(least)
    if least.strip("0") == "" and most.strip("9") == "":
        return f"[0-9]{{{size}}}" if size else ""
    if least[0] == most[0]:
        return least[0] + _digits(least[1:], most[1:])
    low, high, parts = int(least[0]), int(most[0]), []
    if least[1:].strip("0"):
        parts.append(f"{low}{_digits(least[1:], '9' * (size - 1))}")
        low += 1
    if most[1:].strip("9"):
        parts.append(f"{high}{_digits('0' * (size - 1), most[1:])}")
        high -= 1
    if low <= high:
        parts.append(f"[{low}-{high}][0-9]{{{size - 1}}}")
    return f"({'|'.join(parts)})"


def _parts(number: Decimal) -> tuple[int, int]:
    """Return digits without trailing noughts and the power of ten that they are multiplied by."""
    exact = Context(prec=max(1, len(number.as_tuple().digits)))
    sign, digits, exponent = number.normalize(exact).as_tuple()
    whole = int("".join(map(str, digits)))
    return -whole if sign else whole, int(exponent)


_ESCAPED_BY_NUMBER = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")


def is_plain(value: Any) -> bool:
    """Tell whether llguidance writes a constant as it is."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    if isinstance(value, str):
        return not _ESCAPED_BY_NUMBER.search(value)
    if is_number(value):
        return is_exact(value) and "e" not in repr(float(value))
    return True


def scalar_texts(value: Any) -> list[str]:
    """Return the texts of a constant that is neither a list nor an object."""
    if is_number(value):
        return spellings(value)
    return [json.dumps(value, ensure_ascii=False)]


def type_of(value: Any) -> str:
    """Return the type of a value, the narrowest one."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if is_number(value):
        return "integer" if value == int(value) else "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def key_of(value: Any) -> Any:
    """Return a key that values share if they are equal for JSON, where no boolean is a number."""
    if isinstance(value, list):
        return ("array", *map(key_of, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, key_of(part)) for name, part in value.items()))
    return (type_of(value), value)


def constants(schema: dict[str, Any]) -> list[Any] | None:
    """Return the constants that a schema is restricted to; ``None`` if it is to none."""
    if "const" in schema:
        listed = schema.get("enum", [schema["const"]])
        keys = {key_of(value) for value in listed} if isinstance(listed, list) else set()
        return [schema["const"]] if key_of(schema["const"]) in keys else []
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def doubles(value: Any) -> Any:
    """Return plain JSON whose numbers are integers and doubles."""
    if isinstance(value, dict):
        return {name: doubles(part) for name, part in value.items()}
    if isinstance(value, list):
        return [doubles(part) for part in value]
    return float(value) if isinstance(value, Decimal) else value


BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def inexact_bounds(schema: dict[str, Any]) -> list[str]:
    """Return the bounds of a schema that llguidance would take for others."""
    return [name for name in BOUNDS if is_number(bound := schema.get(name)) and not is_exact(bound)]


def integer_bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the least and the greatest integer that the bounds of a schema allow."""
    low, high = schema.get("minimum"), schema.get("maximum")
    lows = [ceil(low)] if is_number(low) else []
    highs = [floor(high)] if is_number(high) else []
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    above = low if above is True else above  # as in draft 4
    below = high if below is True else below
    lows += [floor(above) + 1] if is_number(above) else []
    highs += [ceil(below) - 1] if is_number(below) else []
    return max(lows, default=None), min(highs, default=None)


def excluded_integers(schema: dict[str, Any], is_merged: bool) -> dict[str, Decimal]:
    """Return the bounds to have in the place of exclusive ones, where llguidance includes these.

    It lets an integer through that is excluded, where there is no other one up to the opposite
    bound: 0 where a number is above 0 and at most 0.5. The bounds that are returned are inclusive,
    and next to the integers.
    """
    if "number" not in types_of(schema):
        return {}
    found: dict[str, Decimal] = {}
    (low, is_above), (high, is_below) = bound_of(schema, "inimum"), bound_of(schema, "aximum")
    if not is_merged and (low is None or high is None or high - low >= 1):
        return {}
    if low is not None and is_above and low == int(low):
        found["minimum"] = beside(low, 1)
    if high is not None and is_below and high == int(high):
        found["maximum"] = beside(high, -1)
    return found


def bound_of(schema: dict[str, Any], end: str) -> tuple[int | Decimal | None, bool]:
    """Return a bound of a schema, and whether it is excluded."""
    bound, excluded = schema.get(f"m{end}"), schema.get(f"exclusiveM{end}")
    sign = 1 if end == "inimum" else -1
    bound = bound if is_number(bound) else None
    if is_number(excluded) and (bound is None or excluded * sign >= bound * sign):
        return excluded, True
    return bound, excluded is True  # as in draft 4


def shorter_numbers(schema: dict[str, Any], bounds: dict[str, Any]) -> list[float]:
    """Return the numbers within bounds that have fewer digits than one of these begins with."""
    if "number" not in types_of(schema):
        return []
    exact = {
        name: Decimal(repr(bound)) if isinstance(bound, float) else bound
        for name, bound in bounds.items()
    }
    (low, is_above), (high, is_below) = bound_of(exact, "inimum"), bound_of(exact, "aximum")
    found = {
        number
        for bound in exact.values()
        if is_number(bound)
        for number in shortened(bound)
        if number != int(number)
        and (low is None or number > low or (number == low and not is_above))
        and (high is None or number < high or (number == high and not is_below))
    }
    return sorted(map(float, found))
