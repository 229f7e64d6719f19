"""Sampler: one random stream that draws tokens from rows."""

from __future__ import annotations

import math
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import checked, integer, number, optional, sequence, switch
from genlm_backend.errors import EvaluationError
from genlm_backend.llm.query import check_known_ids


@final
class Sampler:
    """Draws from log-probability rows by inverting their cumulative distribution.

    A draw uses one random number of the sampler's own, so that equal seeds give equal
    continuations, whatever else is sampled meanwhile.

    Args:
        temperature: Divisor of the log-probabilities; 0 takes the largest, and infinity draws
            from all possible tokens alike.
        seed: Seed of the random numbers; equal seeds and streams give equal draws from equal
            rows. ``None`` draws afresh.
        stream: Number of the stream among the independent ones of ``seed``.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of another type.
        OptionError: (``ValueError``) If an argument is negative, or ``temperature`` is NaN.
    """

    def __init__(self, temperature: float = 1.0, seed: int | None = None, stream: int = 0) -> None:
        given = checked(CHECKS, {"temperature": temperature, "seed": seed, "stream": stream})
        self.temperature: float = given["temperature"]
        entropy = None if seed is None else [given["seed"], given["stream"]]
        self._random = np.random.default_rng(entropy)

    def draw(self, row: torch.Tensor) -> int:
        """Return a token id drawn from ``row``, float ``[vocab]``, normalised or not.

        Raises:
            EvaluationError: (``RuntimeError``) If the row is NaN, or no token is possible.
        """
        if self.temperature == 0:
            token_id = int(row.argmax())
            check_possible(float(row[token_id]))
            return token_id
        scores = row.detach().cpu().float().numpy()
        largest = scores.max()
        check_possible(largest)
        return invert(np.exp(tempered(scores - largest, self.temperature)), self._random.random())


def tempered(scores: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """Return scores whose largest is 0 divided by a temperature, however large or small it is.

    What is impossible stays so at an infinite temperature.
    """
    if temperature == 1:
        return scores
    with np.errstate(over="ignore", invalid="ignore"):
        divided = (scores / np.float64(temperature)).astype(np.float32)
    return np.where(np.isneginf(scores), scores, divided)


def check_possible(score: float) -> None:
    """Raise an ``EvaluationError`` if the largest of some scores is none that can be chosen."""
    if not math.isfinite(score):
        raise EvaluationError(f"no token can be chosen from scores whose largest is {score}")


CHECKS: Final = {
    "temperature": number(0, is_finite=False),
    "seed": optional(integer(0)),
    "stream": integer(0),
    "max_tokens": integer(0),
    "eos_token_ids": sequence(integer(), "a collection of token ids"),
    "progress": switch,
}
"""Checks of what samplers and the ``sample`` methods of models take, by name."""


def check_sampling(vocab_size: int, **options: Any) -> dict[str, Any]:
    """Return options of ``sample`` and ``batch_sample`` as they are meant.

    Args:
        vocab_size: Number of ids that the model has.
        **options: Options by name.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of another type.
        OptionError: (``ValueError``) If an option is out of its bounds.
    """
    given = checked(CHECKS, options)
    check_known_ids("eos_token_ids", given.get("eos_token_ids", ()), vocab_size)
    return given


_NUM_BLOCKS = 256


def invert(weights: NDArray[np.float32], point: float) -> int:
    """Return the index where the cumulative sum of ``weights`` passes ``point`` of the whole.

    Sums of blocks are searched first and one block after them, because a running sum over a
    vocabulary takes several times as long as a plain one.

    Args:
        weights: Weights, each zero or more and not all zero, ``[n]``.
        point: Share of the whole sum, from 0 up to, and not including, 1.
    """
    size = len(weights) // _NUM_BLOCKS
    if size < 2:
        return _search(np.cumsum(weights, dtype=np.float64), weights, point)
    whole = size * _NUM_BLOCKS
    sums = weights[:whole].reshape(_NUM_BLOCKS, size).sum(1, dtype=np.float64)
    sums = np.append(sums, weights[whole:].sum(dtype=np.float64))
    ends = np.cumsum(sums)
    block = _search(ends, sums, point)
    begin = ends[block] - sums[block]
    part = weights[block * size : (block + 1) * size] if block < _NUM_BLOCKS else weights[whole:]
    inside = (point * ends[-1] - begin) / sums[block]
    return block * size + _search(np.cumsum(part, dtype=np.float64), part, inside)


def _search(ends: NDArray[np.float64], weights: NDArray[np.floating], point: float) -> int:
    # An interval of width zero is never found when one searches on the right.
    index = int(np.searchsorted(ends, point * ends[-1], side="right"))
    # Rounding may put the point behind the last interval that has any width.
    return index if index < len(ends) else int(np.flatnonzero(weights)[-1])
