"""Draws of a token id from a row, by inverting a cumulative sum; masks of allowed tokens.

The reference implementation is ``naive_draw`` in tests/naive.py.
"""

from __future__ import annotations

import inspect
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import integer, number, sequence, shown
from genlm_backend.errors import EvaluationError, OptionError, OptionTypeError
from genlm_backend.queries.query import check_known_ids
from genlm_backend.queries.row import spare_memory

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
TokenArray: TypeAlias = NDArray[np.int64]

AnyRow = torch.Tensor | NDArray[np.floating]
"""A row of log-probabilities or other scores, float ``[vocab]``, on any device."""

RandomGenerator = np.random.Generator | torch.Generator
"""A caller's random generator. Callers may pass ``None`` for numbers of the operating system."""


def draw(
    row: Any, vocab_size: int, generator: RandomGenerator | None = None, temperature: float = 1.0
) -> int:
    """Check the arguments; return a token id drawn from the softmax of ``row / temperature``."""
    scores, uniform = checked_row(row, vocab_size), uniform_of(generator)
    return draw_token(scores, TEMPERATURE("temperature", temperature), uniform)


class Draw(NamedTuple):
    """A drawn token, with the terms of its importance weight.

    A particle that is extended by the token gains the log-weight ``logprob - log_proposal``, at any
    temperature. At temperature 1, this weight is ``log_allowed`` for every token.

    Attributes:
        token_id: Id of the token.
        logprob: Its log-probability under the model at temperature 1, without mask or bounds.
        log_allowed: Log-mass of the tokens that could be drawn: those allowed and within the bounds
            ``top_k``, ``top_p`` and ``min_p`` (unused at temperature 0); 0 if these are all tokens.
        log_proposal: Log-probability with which it was drawn, among those tokens and at the
            temperature of the draw; 0 at temperature 0.
    """

    token_id: int
    logprob: float
    log_allowed: float
    log_proposal: float


TEMPERATURE: Final = number(0, is_finite=False)
"""Check of a temperature: zero or more, infinity included."""


def draw_token(scores: Floats, temperature: float, uniform: Callable[[], float]) -> int:
    """Return a token id drawn from the softmax of ``scores / temperature``; at 0, the argmax."""
    largest = scores.max()
    check_possible(largest, OptionError)
    is_share = 0 < largest <= 1 and len(scores) > 10 and scores.min() >= 0
    if is_share and abs(scores.sum(dtype=np.float64) - 1) < 1e-3:
        raise OptionError("row seems to contain probabilities: pass their logarithms")
    if temperature == 0:
        return int(scores.argmax())
    return Inversion(weights_of(scores, largest, temperature)).index(uniform())


def weights_of(scores: Floats, largest: np.float32, temperature: float) -> Floats:
    """Return the weights of a draw in another array: ``exp((scores - largest) / temperature)``."""
    # All steps write to one array in reused memory: the page faults of new arrays would cost more
    # than the arithmetic.
    found = spare_memory.take_array(scores.shape, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(scores, largest, out=found)
        if temperature != 1:
            # At temperature inf, an impossible token would get -inf / inf, which is NaN. Division
            # by the largest finite number avoids that, and still maps finite scores to zero.
            divisor = min(temperature, sys.float_info.max)
            np.divide(found, divisor, out=found, dtype=np.float64, casting="same_kind")
        return np.exp(found, out=found)


def check_possible(score: float, error: type[Exception] = EvaluationError) -> None:
    """Raise ``error`` if ``score``, the largest of a row, is not finite."""
    if not math.isfinite(score):
        raise error(f"no token can be chosen from a row whose largest score is {score}")


# -------------------------------------------------------------------- masks of allowed tokens

_NO_TOKEN: Final = (
    "{} contains no token, maybe because a constraint has ended (is_ended); the draws of a model "
    "(not smc) accept that with impossible='return', and choose no token"
)


@final
@dataclass(frozen=True, slots=True)
class PackedMask:
    """Mask of allowed next tokens, one bit per token; ``draw_next_token`` takes it.

    Attributes:
        bits: The bits in the order of ``numpy.packbits``: ``ceil(vocab_size / 8)`` bytes, padded
            with zero bits.
        vocab_size: Number of the model's token ids.
    """

    bits: bytes
    vocab_size: int

    def __repr__(self) -> str:
        num_tokens = int.from_bytes(self.bits, "big").bit_count()
        return f"PackedMask({num_tokens} of {self.vocab_size} tokens)"

    def __and__(self, allowed: Allowed) -> PackedMask:
        other = packed_mask(allowed, self.vocab_size, may_be_empty=True)
        if other is None:
            raise OptionTypeError("a mask cannot be combined with None")
        both = int.from_bytes(self.bits, "big") & int.from_bytes(other, "big")
        return PackedMask(both.to_bytes(len(self.bits), "big"), self.vocab_size)

    def unpacked(self) -> torch.Tensor:
        """Return whether each token is allowed: bool ``[vocab_size]``, a new tensor."""
        bools = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=self.vocab_size)
        return torch.from_numpy(bools.view(np.bool_))


Mask: TypeAlias = torch.Tensor | NDArray[np.bool_] | PackedMask
"""Tokens that may be drawn: bools ``[vocab]``, or packed bits."""

Allowed: TypeAlias = Mask | Iterable[int]
"""Tokens that may be drawn: a mask, or token ids."""


def packed_mask(
    allowed: Any, vocab_size: int, may_be_empty: bool = False, name: str = "allowed"
) -> bytes | None:
    """Check ``allowed``; return its mask with one bit per token, or ``None`` for ``None``."""
    if allowed is None:
        return None
    if isinstance(allowed, PackedMask):
        _check_bits(name, allowed, vocab_size)
        if not any(allowed.bits) and not may_be_empty:
            raise OptionError(_NO_TOKEN.format(name))
        return allowed.bits
    if callable(getattr(allowed, "mask", None)) and hasattr(allowed, "fork"):
        raise OptionTypeError(f"{name} is a constraint, not a mask: pass constraint.mask() instead")
    if isinstance(allowed, list) and allowed and all(type(own) is bool for own in allowed):
        raise OptionTypeError(f"{name} is a list of bools: pass numpy.array({name})")
    values = as_ids_or_bools(name, allowed)
    if isinstance(values, np.ndarray) and values.dtype == bool:
        if values.shape != (vocab_size,):
            raise OptionError(
                f"{name} must have {vocab_size} elements, one per token id; got the shape "
                f"{values.shape}"
            )
        mask = values
    else:
        mask = _mask_of_ids(name, values, vocab_size)
    if not mask.any() and not may_be_empty:
        raise OptionError(_NO_TOKEN.format(name))
    return np.packbits(mask).tobytes()


def _mask_of_ids(name: str, values: Any, vocab_size: int) -> NDArray[np.bool_]:
    if isinstance(values, np.ndarray):
        is_long = values.dtype.kind in "iu" and values.shape == (vocab_size,) and vocab_size > 2
        if is_long and set(values.tolist()) <= {0, 1}:
            raise OptionError(
                f"{name} is a mask of numbers, {values.dtype} [{vocab_size}], and would be "
                "read as token ids: pass bools"
            )
        if values.dtype.kind not in "iu" or values.ndim != 1:
            values = values.tolist()  # checked as a list below
    ids = values
    if not isinstance(values, np.ndarray):
        listed_ids = _IDS(name, values)
        try:
            ids = np.array(listed_ids, np.int64)
        except OverflowError:  # an id beyond int64
            check_known_ids(name, listed_ids, vocab_size)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    check_known_ids(name, wrong[:1].tolist(), vocab_size)
    mask = np.zeros(vocab_size, bool)
    mask[ids] = True
    return mask


def _check_bits(name: str, mask: PackedMask, vocab_size: int) -> None:
    if type(mask.bits) is not bytes:
        raise OptionTypeError(f"the bits of {name} must be bytes, got {shown(mask.bits)}")
    if mask.vocab_size != vocab_size or len(mask.bits) != -(-vocab_size // 8):
        raise OptionError(
            f"{name} must be a mask of {vocab_size} tokens, one bit each; got a mask of "
            f"{mask.vocab_size} tokens in {len(mask.bits)} bytes"
        )


def as_ids_or_bools(name: str, values: Any) -> Any:
    """Return a tensor of ids or bools as an array, and anything but a tensor unchanged."""
    if not isinstance(values, torch.Tensor):
        return values
    is_exact = not (values.is_floating_point() or values.is_complex() or values.is_quantized)
    if not is_exact or values.is_meta or values.layout is not torch.strided:
        raise OptionTypeError(f"{name} must be bools or token ids, got {shown(values)}")
    return values.detach().cpu().numpy()


_IDS: Final = sequence(integer(), "an array of bools or a collection of token ids")


# -------------------------------------------------------------------- rows and generators


def checked_row(row: Any, vocab_size: int) -> Floats:
    """Check a row; return it as float32 in CPU memory, without a copy if it is that already."""
    if isinstance(row, torch.Tensor):
        is_row = row.is_floating_point() and row.layout is torch.strided and not row.is_meta
    else:
        is_row = isinstance(row, np.ndarray) and np.issubdtype(row.dtype, np.floating)
    if not is_row:
        hint = ": await it first" if inspect.isawaitable(row) else ""
        raise OptionTypeError(f"row must be a tensor or array of floats, got {shown(row)}{hint}")
    if row.shape != (vocab_size,):
        raise OptionError(
            f"row must have {vocab_size} elements, one per token id; got the shape "
            f"{tuple(row.shape)}"
        )
    return as_scores(row)


def as_scores(row: AnyRow) -> Floats:
    """Return a row as float32 in CPU memory, without a copy if it is that already."""
    if isinstance(row, torch.Tensor):
        return row.detach().cpu().float().numpy()
    with np.errstate(over="ignore"):
        return row.astype(np.float32, copy=False)


_FRESH: Final = random.SystemRandom()
"""Random numbers of the operating system: forks do not repeat them, and no seed changes them."""


def uniform_of(generator: Any) -> Callable[[], float]:
    """Return a function that draws numbers in [0, 1) from ``generator``, or from the OS if none."""
    if generator is None:
        return _FRESH.random
    if isinstance(generator, np.random.Generator):
        return generator.random
    if not isinstance(generator, torch.Generator):
        raise OptionTypeError(
            "generator must be a numpy.random.Generator or torch.Generator, got "
            f"{shown(generator)}: make np.random.default_rng(seed) once, and pass it to every draw"
        )
    options: dict[str, Any] = {"dtype": torch.float64, "device": generator.device}
    return lambda: float(torch.rand((), generator=generator, **options))


# -------------------------------------------------------------------- the cumulative sum

_NUM_BLOCKS = 256


@final
class Inversion:
    """Inverts a cumulative sum of weights; never returns the index of a zero weight."""

    def __init__(self, weights: Floats) -> None:
        # Search block sums first, then one block: a cumulative sum over the vocabulary takes
        # several times as long as a plain sum. float64 keeps the rarest tokens from rounding away.
        self._weights, self._size = weights, len(weights) // _NUM_BLOCKS
        whole = self._size * _NUM_BLOCKS if self._size > 1 else 0
        self._sums: Doubles = np.empty(_NUM_BLOCKS + 1 if whole else 1, np.float64)
        if whole:
            blocks = weights[:whole].reshape(_NUM_BLOCKS, self._size)
            np.add.reduce(blocks, 1, np.float64, self._sums[:-1])
        self._sums[-1] = np.add.reduce(weights[whole:], dtype=np.float64)
        self._ends = self._sums.cumsum()

    @property
    def total(self) -> float:
        return float(self._ends[-1])

    def sum_of_weights(self) -> float:
        """Return NumPy's sum of all weights, which rounds differently from ``total``."""
        return float(self._weights.sum(dtype=np.float64))

    def index(self, point: float) -> int:
        """Return the index where the cumulative sum passes ``point * total`` (``total > 0``)."""
        block = _search(self._ends, self._sums, point)
        # ``begin`` is read from the searched array: a new sum could round to more than the point.
        begin = self._ends[block - 1] if block else 0.0
        inside = (point * self._ends[-1] - begin) / self._sums[block]
        start, own = self._block(block)
        return start + _search(np.cumsum(own, dtype=np.float64), own, inside)

    def remove(self, index: int) -> None:
        """Set the weight at ``index`` to zero, and update the sums."""
        self._weights[index] = 0
        block = min(index // self._size, len(self._sums) - 1) if self._size else 0
        self._sums[block] = self._block(block)[1].sum(dtype=np.float64)
        np.cumsum(self._sums, out=self._ends)

    def _block(self, block: int) -> tuple[int, Floats]:
        """Return the start of a block, and its weights."""
        start = block * self._size
        is_last = block == len(self._sums) - 1
        return start, self._weights[start:] if is_last else self._weights[start:][: self._size]


def _search(ends: Doubles, weights: NDArray[np.floating], point: float) -> int:
    # side="right" never finds an interval of zero width.
    index = int(np.searchsorted(ends, point * ends[-1], side="right"))
    # Rounding may put the point after the last interval of nonzero width.
    return index if index < len(ends) else int(np.flatnonzero(weights)[-1])
