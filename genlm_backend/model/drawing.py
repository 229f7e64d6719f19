"""Drawing: the next token, asked for instead of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Literal, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import integer, one_of, sequence
from genlm_backend.errors import EvaluationError, OptionError
from genlm_backend.model.draw import (
    TEMPERATURE,
    Draw,
    check_possible,
    invert,
    uniform_of,
    weights_of,
)
from genlm_backend.model.query import Query, check_known_ids
from genlm_backend.model.readout import Readout
from genlm_backend.model.row import spare_memory


@final
@dataclass(frozen=True, slots=True)
class Drawing(Readout):
    """A context, and the random number that its next token is drawn by.

    The answer is a ``Draw`` of the token that ``draw_token`` returns of the context's row. So it is
    the same wherever it is drawn, and equal drawings have equal answers.

    Attributes:
        query: The context, and the adapter to read it with.
        temperature: Divisor of the log-probabilities; 0 takes the first of the most probable.
        uniform: A number from 0 up to, and not including, 1.
        allowed: A bit for each token, set where it may be drawn, as ``packed_mask`` packs them;
            ``None`` where all may be.
        may_fail: Whether a draw where no token is possible is ``NO_DRAW``, and no error.
    """

    query: Query
    temperature: float
    uniform: float
    allowed: bytes | None = None
    may_fail: bool = False
    wanted: ClassVar[str] = "a Draw for a drawing"

    @classmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        """Return a draw from each row, or the error where no token is possible."""
        pairs = zip(readouts, rows.cpu().numpy(), strict=True)
        return [_drawn(drawing, row) for drawing, row in pairs]

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` is a ``Draw``, of no token only where that may be."""
        least = NO_DRAW.token_id if self.may_fail else 0
        is_draw = isinstance(answer, Draw) and type(answer.token_id) is int
        return is_draw and least <= answer.token_id < vocab_size


def _drawn(drawing: Drawing, logprobs: NDArray[np.float32]) -> Draw | EvaluationError:
    if drawing.allowed is None:
        scores = logprobs
    else:
        mask = np.unpackbits(np.frombuffer(drawing.allowed, np.uint8), count=len(logprobs))
        scores = np.where(mask.view(bool), logprobs, np.float32(-np.inf))
    largest = scores.max()
    if drawing.may_fail and largest == -np.inf:
        return NO_DRAW
    try:
        check_possible(largest)
    except EvaluationError as error:
        return error
    if drawing.temperature == 0:
        token_id, total = int(scores.argmax()), None
    else:
        weights = weights_of(scores, largest, drawing.temperature)
        token_id = invert(weights, drawing.uniform)
        total = weights.sum(dtype=np.float64) if drawing.temperature == 1 else None
    log_allowed = 0.0
    if drawing.allowed is not None:
        of_allowed = log_sum(scores) if total is None else float(largest) + math.log(total)
        log_allowed = log_mass(of_allowed, logprobs)
    return Draw(token_id, float(logprobs[token_id]), log_allowed)


NO_DRAW: Final = Draw(-1, -math.inf, -math.inf)
"""The draw where no token is possible: ``token_id`` is -1, which is no token of any model."""


_ROUNDING: Final = 5e-5
"""Distance from 0 up to which the logarithm of a row's sum is that of one but for rounding.

Rows of up to 151,936 tokens were 6e-7 off here, and those of torch's ``log_softmax`` 2e-5.
"""


def log_mass(total: float, row: NDArray[np.floating]) -> float:
    """Return the logarithm of the probability of some tokens of a row, given their ``log_sum``.

    It is never above 0, nor below the log-probability of one of them, and it is 0 where the row is
    whole and no token is left out that has a probability: a whole row sums to one but for the
    rounding of each. What is missing from a row that has been restricted before counts.

    Args:
        total: Logarithm of the sum of their probabilities, as rounded as these are.
        row: Log-probabilities of all tokens, ``[vocab]``.
    """
    is_all = abs(total) < _ROUNDING and total == log_sum(row)
    return 0.0 if is_all else min(total, 0.0)


def log_sum(logprobs: NDArray[np.floating]) -> float:
    """Return the logarithm of the sum of probabilities, in float64."""
    largest = logprobs.max()
    if largest == -np.inf:
        return -math.inf
    shifted = spare_memory.take(logprobs.shape, logprobs.dtype.type)
    np.subtract(logprobs, largest, out=shifted)
    with np.errstate(under="ignore"):
        total = np.exp(shifted, out=shifted).sum(dtype=np.float64)
    return float(largest) + math.log(total)


Impossible: TypeAlias = Literal["raise", "return"]
"""Answer to a draw where no token is possible: an error, or a ``Draw`` without a token."""

Allowed: TypeAlias = torch.Tensor | NDArray[np.bool_] | Iterable[int]
"""Tokens that may be drawn: bools ``[vocab]``, or token ids."""

_IMPOSSIBLE: Final = one_of("raise", "return")


def drawing_of(
    vocab_size: int, allowed: Any, generator: Any, temperature: Any, impossible: Any
) -> Callable[[Query], Drawing]:
    """Return a maker of drawings, once its options are checked; it has the random number.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of another type.
        OptionError: (``ValueError``) If one is out of its bounds.
    """
    divisor = TEMPERATURE("temperature", temperature)
    may_fail = _IMPOSSIBLE("impossible", impossible) == "return"
    mask, uniform = packed_mask(allowed, vocab_size, may_fail), uniform_of(generator)
    point = uniform() if divisor else 0.0
    return partial(Drawing, temperature=divisor, uniform=point, allowed=mask, may_fail=may_fail)


def packed_mask(allowed: Any, vocab_size: int, may_be_empty: bool = False) -> bytes | None:
    """Return the mask of the tokens that may be drawn, a bit for each, once it is checked.

    Args:
        allowed: Array or tensor of bools ``[vocab_size]``, or a collection of token ids; ``None``
            for all tokens.
        vocab_size: Number of ids that the model has.
        may_be_empty: Whether no token may be drawn, too.

    Raises:
        OptionTypeError: (``TypeError``) If it is neither.
        OptionError: (``ValueError``) If it is of another shape, an id is outside the vocabulary, or
            no token is allowed.
    """
    if allowed is None:
        return None
    values = allowed.detach().cpu().numpy() if isinstance(allowed, torch.Tensor) else allowed
    if isinstance(values, np.ndarray) and values.dtype == bool:
        if values.shape != (vocab_size,):
            raise OptionError(
                f"allowed must be one of {vocab_size} elements, as the vocabulary has; got the "
                f"shape {values.shape}"
            )
        mask = values
    else:
        if isinstance(values, np.ndarray):
            is_long = values.dtype.kind in "iu" and values.shape == (vocab_size,) != (2,)
            if is_long and set(values.tolist()) <= {0, 1}:
                raise OptionError(
                    f"allowed is a mask of numbers, {values.dtype} [{vocab_size}], and would be "
                    "read as token ids: pass bools"
                )
            if values.dtype.kind not in "iu" or values.ndim != 1:
                values = values.tolist()  # to be refused as a list is
        is_checked = isinstance(values, np.ndarray)
        ids = values if is_checked else np.array(_IDS("allowed", values), np.int64)
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        check_known_ids("allowed", wrong[:1].tolist(), vocab_size)
        mask = np.zeros(vocab_size, bool)
        mask[ids] = True
    if not mask.any() and not may_be_empty:
        raise OptionError("allowed has no token: nothing can be drawn")
    return np.packbits(mask).tobytes()


_IDS: Final = sequence(integer(), "an array of bools or a collection of token ids")
