"""Drawing: the next token, asked for instead of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import checked, integer, number, one_of, sequence
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


class Cuts(NamedTuple):
    """Bounds on the tokens that are drawn from, as ``generate`` has them.

    Attributes:
        top_k: Only so many of the most probable tokens; 0 for no bound. Those that are as
            probable as the last of them count as well.
        top_p: Only tokens than which more probable ones have less than this probability together
            (Holtzman et al., 2020, arXiv:1904.09751), above 0 to 1.
        min_p: Only tokens that have this share of the most probable one's probability, 0 to 1.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def least(self, weights: NDArray[np.float32]) -> float:
        """Return the least weight that is drawn from, of weights of which the largest is 1."""
        least = np.float32(np.finfo(np.float32).smallest_subnormal)
        if 0 < self.top_k < len(weights):
            least = max(least, np.partition(weights, -self.top_k)[-self.top_k])
        if self.top_p < 1:
            least = max(least, _least_of_nucleus(weights[weights >= least], self.top_p))
        return max(float(least), self.min_p)


def _least_of_nucleus(weights: NDArray[np.float32], share: float) -> np.float32:
    """Return the least of the largest weights that come to a share of all of them."""
    bound, size = share * weights.sum(dtype=np.float64), _FEW_OF_NUCLEUS
    while True:
        size = min(size, len(weights))
        # A few of the largest are enough as a rule, and all of them take ten times as long.
        largest = np.sort(np.partition(weights, len(weights) - size)[len(weights) - size :])[::-1]
        before = np.cumsum(largest, dtype=np.float64) - largest
        num_kept = int(np.searchsorted(before, bound, side="left"))
        if num_kept < size or size == len(weights):
            return largest[max(num_kept, 1) - 1]
        size *= 8


_FEW_OF_NUCLEUS: Final = 512


@final
@dataclass(frozen=True, slots=True)
class Drawing(Readout):
    """A context, and the random number that its next token is drawn by.

    The answer is a ``Draw`` of the token that ``draw_token`` returns of the context's row. So it is
    the same wherever it is drawn, but for the rounding of exponentials on a device, and equal
    drawings have equal answers.

    Attributes:
        query: The context, and the adapter to read it with.
        temperature: Divisor of the log-probabilities; 0 takes the first of the most probable.
        uniform: A number from 0 up to, and not including, 1.
        allowed: A bit for each token, set where it may be drawn, as ``packed_mask`` packs them;
            ``None`` where all may be.
        may_fail: Whether a draw where no token is possible is ``NO_DRAW``, and no error.
        cuts: Bounds on the tokens that are drawn from; ``None`` for none.
    """

    query: Query
    temperature: float
    uniform: float
    allowed: bytes | None = None
    may_fail: bool = False
    cuts: Cuts | None = None
    wanted: ClassVar[str] = "a Draw for a drawing"

    @classmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        """Return a draw from each row, or the error where no token is possible."""
        if not rows.is_cpu and all(drawing.cuts is None for drawing in readouts):
            starts = range(0, len(rows), MANY_ROWS)
            parts = [slice(start, start + MANY_ROWS) for start in starts]
            return [one for own in parts for one in drawn_at_once(readouts[own], rows[own])]
        rows = rows.cpu()
        pairs = zip(readouts, rows.numpy(), strict=True)
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
        if drawing.cuts is not None:
            is_left = weights >= drawing.cuts.least(weights)
            scores = np.where(is_left, scores, np.float32(-np.inf))
            np.multiply(weights, is_left, out=weights)
        token_id = invert(weights, drawing.uniform)
        total = weights.sum(dtype=np.float64) if drawing.temperature == 1 else None
    log_allowed = 0.0
    if drawing.allowed is not None or (drawing.cuts is not None and drawing.temperature):
        of_allowed = log_sum(scores) if total is None else float(largest) + math.log(total)
        log_allowed = log_mass(of_allowed, logprobs)
    return Draw(token_id, float(logprobs[token_id]), log_allowed)


MANY_ROWS: Final = 128
"""Rows that are drawn from at once on a device: 64 MB of each table, of 131,072 tokens."""

_NUM_BLOCKS: Final = 256


def drawn_at_once(drawings: Sequence[Drawing], rows: torch.Tensor) -> list[Draw | EvaluationError]:
    """Return draws from rows on a device, which stay there; see ``Drawing.of_rows``.

    The cumulative sum of each row is inverted as ``invert`` does: sums of blocks are searched, and
    then one block, in float64.

    Args:
        drawings: The drawings.
        rows: Their rows: float32 ``[n, vocab]``.
    """
    device = rows.device

    def numbers(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor([*values], dtype=torch.float64, device=device)

    scores = rows
    if any(drawing.allowed is not None for drawing in drawings):
        scores = rows.masked_fill(~_masks(drawings, rows), -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = scores - largest
    temperatures = [drawing.temperature for drawing in drawings]
    if any(temperature not in (0, 1) for temperature in temperatures):
        most = float(np.finfo(np.float64).max)  # an infinite one makes a NaN of what is impossible
        divisors = numbers(min(t, most) if t else 1.0 for t in temperatures)
        weights = (weights.double() / divisors[:, None]).float()
    found = _inverted(weights.exp_(), numbers(drawing.uniform for drawing in drawings))
    is_greedy = torch.tensor([not t for t in temperatures], dtype=torch.bool, device=device)
    token_ids = torch.where(is_greedy, scores.argmax(-1), found)
    sums = [_log_sums(scores), _log_sums(rows)]
    of_token = rows.gather(1, token_ids[:, None])
    answers = torch.stack(
        [token_ids.double(), of_token[:, 0].double(), *sums, largest[:, 0].double()], 1
    )
    return [_answer(*pair) for pair in zip(drawings, answers.tolist(), strict=True)]


def _answer(drawing: Drawing, numbers: Sequence[float]) -> Draw | EvaluationError:
    token_id, logprob, of_allowed, of_all, largest = numbers
    if drawing.may_fail and largest == -math.inf:
        return NO_DRAW
    try:
        check_possible(largest)
    except EvaluationError as error:
        return error
    is_all = drawing.allowed is None or (abs(of_allowed) < _ROUNDING and of_allowed == of_all)
    return Draw(int(token_id), logprob, 0.0 if is_all else min(of_allowed, 0.0))


def _masks(drawings: Sequence[Drawing], rows: torch.Tensor) -> torch.Tensor:
    """Return which tokens may be drawn: bool ``[n, vocab]``, from the bits of each."""
    vocab_size = rows.shape[1]
    everything = np.packbits(np.ones(vocab_size, bool)).tobytes()
    packed = b"".join([drawing.allowed or everything for drawing in drawings])
    table = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(rows.device)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=rows.device)
    bits = (table.view(len(drawings), -1, 1) >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def _inverted(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return where the cumulative sum of each row passes a share of the whole: int64 ``[n]``.

    Args:
        weights: Weights, each zero or more: float32 ``[n, vocab]``.
        points: Share of the whole sum of each: float64 ``[n]``.
    """
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _NUM_BLOCKS))
    blocks = padded.unflatten(1, (_NUM_BLOCKS, -1))
    sums = blocks.sum(2, dtype=torch.float64)
    ends = sums.cumsum(1)
    block = _passed(ends, sums, points * ends[:, -1])
    # The sum up to here as it was searched: another rounding could lie behind the point.
    begins = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)[:, 0]
    size = blocks.shape[2]
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, size))[:, 0].double()
    own_ends = inside.cumsum(1)
    share = (points * ends[:, -1] - begins) / sums.gather(1, block)[:, 0]
    place = _passed(own_ends, inside, share * own_ends[:, -1])
    return (block * size + place)[:, 0]


def _passed(ends: torch.Tensor, weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return the first interval that has a width and ends behind a point: int64 ``[n, 1]``."""
    # The sums of a device may be rounded so that they rise where nothing is added.
    has_width = weights > 0
    is_behind = has_width & (ends > points[:, None])
    numbers = torch.arange(weights.shape[1], dtype=torch.int64, device=weights.device)
    # Rounding may put the point behind the last interval that has any width.
    last = torch.where(has_width, numbers, 0).amax(1)
    found = torch.where(is_behind.any(1), is_behind.byte().argmax(1), last)
    return found[:, None]


def _log_sums(logprobs: torch.Tensor) -> torch.Tensor:
    """Return logarithms of the sums of probabilities, float64 ``[n]``, as ``log_sum`` does."""
    largest = logprobs.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    total = (logprobs - largest).exp_().sum(-1, dtype=torch.float64)
    return largest[:, 0].double() + total.log()


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


_CUTS: Final = {
    "top_k": integer(0),
    "top_p": number(0, 1, is_open=True),
    "min_p": number(0, 1),
}
"""Checks of the bounds of draws, by name."""


def drawing_of(
    vocab_size: int,
    allowed: Any,
    generator: Any,
    temperature: Any,
    impossible: Any,
    **bounds: Any,
) -> Callable[[Query], Drawing]:
    """Return a maker of drawings, once its options are checked; it has the random number.

    Args:
        vocab_size: Number of ids that the model has.
        allowed: As ``draw_next_token`` has it.
        generator: The same.
        temperature: The same.
        impossible: The same.
        **bounds: ``top_k``, ``top_p`` and ``min_p``.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of another type.
        OptionError: (``ValueError``) If one is out of its bounds.
    """
    divisor = TEMPERATURE("temperature", temperature)
    may_fail = _IMPOSSIBLE("impossible", impossible) == "return"
    mask, uniform = packed_mask(allowed, vocab_size, may_fail), uniform_of(generator)
    point = uniform() if divisor else 0.0
    cuts = Cuts(**checked(_CUTS, bounds))
    return partial(
        Drawing,
        temperature=divisor,
        uniform=point,
        allowed=mask,
        may_fail=may_fail,
        cuts=None if cuts == Cuts() or not divisor else cuts,
    )


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
