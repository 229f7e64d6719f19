"""Numbers of JSON schemas: those that llguidance keeps to exactly, and patterns of the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import ROUND_DOWN, Context, Decimal
from math import gcd, lcm, prod
from typing import Any, TypeGuard

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
    """Return what llguidance makes of a ``multipleOf``: n and e of n · 10⁻ᵉ, if it is that.

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

    Args:
        number: The digits of the divisor, as ``factor_of`` returns them.
        exponent: The number of digits behind its point.
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
    """Return a number next to an integer, as far from it as its digits leave room in a double.

    Args:
        bound: An integer, less than 2**53.
        step: 1 for the number above it, -1 for the one below.
    """
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
