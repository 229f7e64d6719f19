"""Resampling schemes of sequential Monte Carlo, on NumPy arrays.

A scheme is a function ``scheme(log_weights, n, rng)`` that returns the indices of ``n`` ancestors,
int64 ``[n]``, ascending. Log-weights, float64 ``[m]``, need not be normalised. ``-inf`` is a weight
of zero; its index is never returned. Each scheme is unbiased: for normalised weights, index ``i``
is expected ``n * weight_i`` times. The schemes differ in their variance (Douc, Cappé and Moulines,
2005, arXiv:cs/0507025; Gerber, Chopin and Whiteley, 2019, arXiv:1708.06551).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from genlm_backend.checks import instance, integer, shown
from genlm_backend.errors import OptionError, OptionTypeError

__all__ = [
    "SCHEMES",
    "Scheme",
    "effective_sample_size",
    "log_mean",
    "multinomial",
    "residual",
    "scheme_of",
    "ssp",
    "stratified",
    "systematic",
]

Ancestors: TypeAlias = NDArray[np.int64]

Scheme: TypeAlias = Callable[[NDArray[np.float64], int, np.random.Generator], Ancestors]
"""A resampling scheme: a function of log-weights, the number of ancestors and a generator."""


def systematic(log_weights: ArrayLike, n: int, rng: np.random.Generator) -> Ancestors:
    """Resample at ``n`` equidistant points that share one random offset (Kitagawa, 1996).

    Raises:
        OptionTypeError: (``TypeError``) If an argument has a wrong type.
        OptionError: (``ValueError``) If a weight is NaN or infinite, all are zero, or ``n`` < 0.
    """
    weights, count, rng = _checked(log_weights, n, rng)
    return _at(weights, (np.arange(count) + rng.random()) / max(1, count))


def stratified(log_weights: ArrayLike, n: int, rng: np.random.Generator) -> Ancestors:
    """Resample at one random point in each of ``n`` equal intervals (Kitagawa, 1996).

    Raises:
        Exception: Any error of ``systematic``.
    """
    weights, count, rng = _checked(log_weights, n, rng)
    return _at(weights, (np.arange(count) + rng.random(count)) / max(1, count))


def multinomial(log_weights: ArrayLike, n: int, rng: np.random.Generator) -> Ancestors:
    """Resample ``n`` independent indices (Gordon, Salmond and Smith, 1993).

    Raises:
        Exception: Any error of ``systematic``.
    """
    weights, count, rng = _checked(log_weights, n, rng)
    return _at(weights, np.sort(rng.random(count)))


def residual(log_weights: ArrayLike, n: int, rng: np.random.Generator) -> Ancestors:
    """Take ``floor(n * weight)`` copies of each index, and draw the rest (Liu and Chen, 1998).

    The rest are drawn as by ``multinomial``, from the fractions that are left.

    Raises:
        Exception: Any error of ``systematic``.
    """
    weights, count, rng = _checked(log_weights, n, rng)
    copies, rests = _copies(weights, count)
    missing = count - int(copies.sum())
    if missing:
        copies += np.bincount(_at(rests, np.sort(rng.random(missing))), minlength=len(weights))
    return np.repeat(np.arange(len(weights)), copies)


def ssp(log_weights: ArrayLike, n: int, rng: np.random.Generator) -> Ancestors:
    """Round ``n * weight`` up or down at random, by the Srinivasan sampling process.

    Each index gets ``floor(n * weight)`` copies or one more, as by ``systematic``. Estimates with
    ``ssp`` converge for any order of the weights, unlike those with ``systematic`` (Gerber, Chopin
    and Whiteley, 2019, arXiv:1708.06551).

    Raises:
        Exception: Any error of ``systematic``.
    """
    weights, count, rng = _checked(log_weights, n, rng)
    copies, rests = _copies(weights, count)
    uniforms, held, share = rng.random(len(weights)).tolist(), -1, 0.0
    for i, own in enumerate(rests.tolist()):
        if own == 0:
            continue
        if held < 0:
            held, share = i, own
            continue
        # Move mass between two fractions until one of them is 0 or 1; both keep their mean.
        total, point = share + own, uniforms[i]
        if total < 1:
            held, share = (held, total) if point * total < share else (i, total)
        else:
            full = held if point * (2 - total) < 1 - own else i
            copies[full] += 1
            held, share = i if full == held else held, total - 1
            if share <= 0:
                held = -1
    if copies.sum() < count:  # rounding kept the last fraction below 1: add its copy
        copies[held if held >= 0 else int(rests.argmax())] += 1
    return np.repeat(np.arange(len(weights)), copies)


SCHEMES: Final[dict[str, Scheme]] = {
    "systematic": systematic,
    "stratified": stratified,
    "residual": residual,
    "multinomial": multinomial,
    "ssp": ssp,
}
"""The schemes by name."""


def scheme_of(scheme: Any) -> Scheme:
    """Return the scheme with the name ``scheme``, or ``scheme`` itself if it is a function.

    Raises:
        OptionError: (``ValueError``) If no scheme has that name.
    """
    if callable(scheme):
        given: Any = scheme
        return given
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise OptionError(f"scheme must be a function or one of {known}; got {shown(scheme)}")
    return SCHEMES[scheme]


def effective_sample_size(log_weights: ArrayLike) -> float:
    """Return ``(sum w)**2 / sum w**2``, between 1 and the number of weights; 0 if all are zero.

    Raises:
        OptionTypeError: (``TypeError``) If ``log_weights`` is not an array of numbers.
        OptionError: (``ValueError``) If a weight is NaN or infinite.
    """
    weights = _relative(_log_weights(log_weights))
    return float(weights.sum() ** 2 / np.square(weights).sum()) if weights.any() else 0.0


def log_mean(log_weights: ArrayLike) -> float:
    """Return the logarithm of the mean weight; ``-inf`` if all are zero.

    Raises:
        Exception: Any error of ``effective_sample_size``.
    """
    own = _log_weights(log_weights)
    if not len(own) or own.max() == -math.inf:
        return -math.inf
    return float(own.max()) + math.log(_relative(own).mean())


# -------------------------------------------------------------------- arithmetic


def _at(weights: NDArray[np.float64], points: NDArray[np.float64]) -> Ancestors:
    """Return, for each point in [0, 1), the index in whose share of the total weight it lies."""
    ends = weights.cumsum()
    found = np.searchsorted(ends, points * ends[-1], side="right")
    return np.minimum(found, np.flatnonzero(weights)[-1])  # a point may round up to the last end


def _copies(
    weights: NDArray[np.float64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ``floor(count * weight)`` for each index, and the fraction that is left."""
    expected = weights * count
    whole = np.round(expected)  # or 2.9999999999 would give two copies, and a third by chance
    expected = np.where(abs(expected - whole) < 1e-9, whole, expected)
    copies = np.floor(expected)
    return copies.astype(np.int64), expected - copies


def _relative(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = log_weights.max(initial=-math.inf)
    if largest == -math.inf:
        return np.zeros(len(log_weights))
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(log_weights - largest)


def _checked(
    log_weights: ArrayLike, n: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], int, np.random.Generator]:
    """Check a scheme's arguments; return the normalised weights, ``n`` and ``rng``."""
    count, rng = integer(0)("n", n), _GENERATOR("rng", rng)
    weights = _relative(_log_weights(log_weights))
    if not weights.any():
        raise OptionError("log_weights has no element above -inf: no index can be resampled")
    return weights / weights.sum(), count, rng


_GENERATOR: Final = instance(
    np.random.Generator, "a numpy.random.Generator, such as numpy.random.default_rng(seed)"
)


def _log_weights(values: Any, name: str = "log_weights") -> NDArray[np.float64]:
    """Check log-weights; return them as float64 ``[m]``."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiu" or array.ndim != 1:
        raise OptionTypeError(f"{name} must be a 1-D array of numbers, got {shown(values)}")
    found = array.astype(np.float64)
    wrong = np.flatnonzero(np.isnan(found) | (found == math.inf))
    if len(wrong):
        raise OptionError(
            f"{name}[{wrong[0]}] is {found[wrong[0]]}: it must be a finite number or -inf"
        )
    return found
