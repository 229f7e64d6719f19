"""SampleReadout: a readout that draws the next token once or several times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypedDict, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import (
    Option,
    checked_options,
    integer,
    listed,
    number,
    one_of,
    shown,
    switch,
)
from genlm_backend.errors import EvaluationError, OptionError
from genlm_backend.queries.query import RowQuery
from genlm_backend.queries.row import spare_memory
from genlm_backend.readouts.draw import (
    TEMPERATURE,
    Draw,
    Floats,
    Inversion,
    PackedMask,
    RandomGenerator,
    TokenArray,
    check_possible,
    packed_mask,
    uniform_of,
    weights_of,
)
from genlm_backend.readouts.draw_table import REORDERED, ROUNDING, Pools, SamplingFilter
from genlm_backend.readouts.readout import Readout


@final
@dataclass(frozen=True, slots=True)
class SampleReadout(Readout):
    """A context and one random number for each draw of its next token.

    The answer is a tuple of ``Draw``, with the tokens that ``draw_token`` returns for the scores
    within ``allowed`` and ``cuts``. Equal readouts have equal answers on any device, up to the
    rounding of exponentials. With ``are_distinct``, each draw is made from the tokens not drawn
    before, and its ``log_allowed`` and ``log_proposal`` refer to these tokens. The tuple ends early
    if none of them is possible. Such draws have the distribution of the tokens with the largest
    Gumbel-perturbed log-probabilities (Kool et al., 2019, arXiv:1903.06059).

    Attributes:
        query: The context, and the adapter to read it with.
        temperature: Divisor of the log-probabilities; 0 takes the most probable token.
        uniforms: One number in [0, 1) for each draw.
        allowed: One bit per token, set if it may be drawn, in the format of ``packed_mask``;
            ``None`` allows all tokens.
        may_fail: Whether the draws are ``NO_DRAW``, instead of an error, if no token is possible.
        cuts: Bounds on the tokens to draw from (top-k, top-p, min-p); ``None`` for no bounds.
        are_distinct: Whether no token is drawn twice.
    """

    query: RowQuery
    temperature: float
    uniforms: tuple[float, ...]
    allowed: bytes | None = None
    may_fail: bool = False
    cuts: SamplingFilter | None = None
    are_distinct: bool = False
    wanted: ClassVar[str] = "a tuple of Draws for a SampleReadout"
    modifies_rows: ClassVar[bool] = False

    @classmethod
    def of_rows(cls, readouts: Sequence[Any], rows: torch.Tensor) -> Sequence[Any]:
        """Return each row's tuple of draws, or an error in place of draws that cannot be made."""
        # Torch has no float64 on "mps", so rows there are copied to the CPU.
        is_device = not rows.is_cpu and rows.device.type != "mps"
        if is_device and all(len(readout.uniforms) == 1 for readout in readouts):
            return drawn_at_once(readouts, rows)
        pairs = zip(readouts, rows.cpu().numpy(), strict=True)
        return [_drawn(readout, row) for readout, row in pairs]

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` has one valid draw per uniform; distinct ones may be fewer."""
        if not isinstance(answer, tuple):
            return False
        least = NO_DRAW.token_id if self.may_fail else 0
        num, most = len(answer), len(self.uniforms)
        has_all = num == most or (self.are_distinct and 0 < num < most)
        return has_all and all(
            isinstance(draw, Draw)
            and type(draw.token_id) is int
            and least <= draw.token_id < vocab_size
            for draw in answer
        )


def _drawn(readout: SampleReadout, logprobs: Floats) -> tuple[Draw, ...] | EvaluationError:
    pool = _pool(readout, logprobs)
    if isinstance(pool, EvaluationError):
        return pool
    if isinstance(pool, Draw):
        return (pool,) * len(readout.uniforms)
    draws = list[Draw]()
    for point in readout.uniforms:
        if draws and readout.are_distinct and not pool.without(draws[-1].token_id):
            break
        draws.append(pool.draw(point))
    return tuple(draws)


def _pool(drawing: SampleReadout, logprobs: Floats) -> _Pool | Draw | EvaluationError:
    """Return the pool of a row's tokens to draw from, or the answer if none can be drawn."""
    scores, ids = logprobs, None
    if drawing.allowed is not None:
        scores, ids = _allowed_scores(logprobs, drawing.allowed)
    largest = scores.max(initial=-np.inf)
    answer = _impossible(drawing, largest)
    return _Pool(drawing, logprobs, scores, ids) if answer is None else answer


def _allowed_scores(logprobs: Floats, allowed: bytes) -> tuple[Floats, TokenArray | None]:
    """Return the allowed tokens' scores and ids; if most are allowed, a masked row and ``None``."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=len(logprobs))
    mask = bits.view(np.bool_)
    if np.count_nonzero(mask) * 2 <= len(logprobs):
        ids = np.flatnonzero(mask)
        return logprobs[ids], ids
    # Taking the minimum with ±inf masks the row; numpy.where can take ten times as long.
    bounds = spare_memory.take_array(logprobs.shape, np.float32)
    np.subtract(bits, np.float32(0.5), out=bounds)
    np.multiply(bounds, np.float32(np.inf), out=bounds)
    return np.minimum(logprobs, bounds, out=bounds), None


def _impossible(drawing: SampleReadout, largest: float) -> Draw | EvaluationError | None:
    """Return the answer if the largest score shows that no token can be drawn, or ``None``."""
    if drawing.may_fail and largest == -math.inf:
        return NO_DRAW
    if largest == -math.inf and drawing.allowed is not None:
        return EvaluationError(
            "no token can be chosen from a row in which all allowed tokens have probability 0: "
            "pass impossible='return' to get a draw without a token"
        )
    try:
        check_possible(largest)
    except EvaluationError as error:
        return error
    return None


@final
class _Pool:
    """The tokens of a row to draw from, once or several times."""

    def __init__(
        self, drawing: SampleReadout, logprobs: Floats, scores: Floats, ids: TokenArray | None
    ) -> None:
        self._scores, self._ids, self._logprobs = scores, ids, logprobs
        temperature = self._temperature = drawing.temperature
        self._is_whole, self._largest = drawing.allowed is None, scores.max()
        self._log_allowed: float | None = None
        self._inversion: Inversion | None = None
        if temperature:
            weights = weights_of(scores, self._largest, temperature)
            if drawing.cuts is not None:
                self._is_whole = False
                left = drawing.cuts.kept(scores, weights)
                self._ids = left if ids is None else ids[left]
                self._scores, weights = scores[left], weights[left]
            self._inversion = Inversion(weights)

    def draw(self, point: float) -> Draw:
        if self._inversion is None:
            token_id = int(self._scores.argmax())
        else:
            token_id = self._inversion.index(point)
        if self._ids is not None:
            token_id = int(self._ids[token_id])
        logprob = float(self._logprobs[token_id])
        if self._log_allowed is None:
            self._log_allowed = 0.0 if self._is_whole else self._log_mass()
        total = 0.0 if self._inversion is None else self._inversion.total
        log_allowed, largest = self._log_allowed, float(self._largest)
        log_proposal = _log_proposal(logprob, log_allowed, largest, self._temperature, total)
        return Draw(token_id, logprob, log_allowed, log_proposal)

    def _log_mass(self) -> float:
        if self._temperature == 1 and self._inversion is not None:  # sum the existing weights
            total = float(self._largest) + math.log(self._inversion.sum_of_weights())
        else:
            total = log_sum(self._scores)
        return log_mass(total, self._logprobs)

    def without(self, token_id: int) -> bool:
        """Exclude a token from later draws; return whether another one is left."""
        if self._scores is self._logprobs:
            self._scores = self._scores.copy()
        index = token_id if self._ids is None else int(np.searchsorted(self._ids, token_id))
        self._scores[index], self._is_whole, self._log_allowed = -np.inf, False, None
        if self._inversion is not None:
            self._inversion.remove(index)
            if self._inversion.total > _FEW:
                return True
            self._largest = self._scores.max()  # relative to it, the weights do not all underflow
            if self._largest > -np.inf:
                self._inversion = Inversion(
                    weights_of(self._scores, self._largest, self._temperature)
                )
        return bool(self._scores.max() > -np.inf)


_FEW: Final = 1e-3
"""If the remaining weights sum to no more than this, they are computed anew."""


def _log_proposal(
    logprob: float, log_allowed: float, largest: float, temperature: float, total: float
) -> float:
    """Return ``Draw.log_proposal``; ``total`` sums the weights, scaled to 1 at ``largest``."""
    if temperature == 0:
        return 0.0
    if temperature == 1:
        return min(logprob - log_allowed, 0.0)
    return min((logprob - largest) / temperature - math.log(total), 0.0)


def drawn_at_once(
    drawings: Sequence[SampleReadout], rows: torch.Tensor
) -> list[tuple[Draw, ...] | EvaluationError]:
    """Draw one token from each row, on its device; return the answers of ``of_rows``."""
    indices, vocab_size = np.arange(len(drawings)), rows.shape[1]
    masks = mask_of = None
    allowed = [drawing.allowed for drawing in drawings]
    if any(own is not None for own in allowed):
        distinct = {own: i for i, own in enumerate(dict.fromkeys(filter(None, allowed)))}
        masks = np.frombuffer(b"".join(distinct), np.uint8).reshape(-1, -(-vocab_size // 8))
        mask_of = np.array([-1 if own is None else distinct[own] for own in allowed])
    temperatures = np.array([drawing.temperature for drawing in drawings], np.float64)
    bounds = [drawing.cuts if drawing.temperature else None for drawing in drawings]
    pools = Pools(indices, temperatures, bounds, masks, mask_of)
    uniforms = np.array([drawing.uniforms[0] for drawing in drawings])
    return list(map(_answer, drawings, pools.draw(rows, uniforms, indices).tolist()))


def _answer(drawing: SampleReadout, numbers: Sequence[float]) -> tuple[Draw, ...] | EvaluationError:
    token_id, logprob, log_allowed, log_proposal, largest = numbers
    answer = _impossible(drawing, largest)
    if answer is not None:
        return (answer,) if isinstance(answer, Draw) else answer
    return (Draw(int(token_id), logprob, log_allowed, log_proposal),)


NO_DRAW: Final = Draw(-1, -math.inf, -math.inf, 0.0)
"""The draw if no token is possible: ``token_id`` is -1, which is not a valid id."""


def log_mass(total: float, row: NDArray[np.floating]) -> float:
    """Return ``total``, the ``log_sum`` of some of a row's tokens, or 0 if they have all mass."""
    # A row sums to 1 up to rounding, unless tokens were excluded from it. So if these tokens and
    # the whole row have the same sum, and it is near 1, the log-mass is 0.
    is_all = abs(total) < ROUNDING and abs(total - log_sum(row)) < REORDERED
    return 0.0 if is_all else min(total, 0.0)


def log_sum(logprobs: NDArray[np.floating]) -> float:
    largest = logprobs.max()
    if largest == -np.inf:
        return -math.inf
    shifted = spare_memory.take_array(logprobs.shape, logprobs.dtype.type)
    np.subtract(logprobs, largest, out=shifted)
    with np.errstate(under="ignore"):
        total = np.exp(shifted, out=shifted).sum(dtype=np.float64)
    return float(largest) + math.log(total)


Impossible: TypeAlias = Literal["raise", "return"]
"""What a draw does if no token is possible: raise, or return a ``Draw`` without a token."""


class DrawOptions(TypedDict, total=False):
    """The options that all methods that draw tokens share; ``draw_next_token`` explains them."""

    generator: Annotated[RandomGenerator | None, Option()]
    temperature: Annotated[float, Option(1.0, TEMPERATURE)]
    top_k: Annotated[int, Option(0, integer(0))]
    top_p: Annotated[float, Option(1.0, number(0, 1, is_open=True))]
    min_p: Annotated[float, Option(0.0, number(0, 1))]
    impossible: Annotated[Impossible, Option("raise", one_of("raise", "return"))]


def drawing_of(
    vocab_size: int, allowed: Any, options: DrawOptions, n: Any = 1, distinct: Any = False
) -> Callable[[RowQuery], SampleReadout]:
    """Check options, take ``n`` random numbers; return a function from a query to its readout."""
    count, are_distinct = integer(1)("n", n), switch("distinct", distinct)
    number_of, alike = _drawn_alike(vocab_size, allowed, options)
    uniforms = tuple(number_of() for _ in range(count))
    return partial(SampleReadout, uniforms=uniforms, are_distinct=are_distinct, **alike)


def drawings_of(
    vocab_size: int, allowed: Any, options: DrawOptions, num_draws: int
) -> Callable[[RowQuery], SampleReadout]:
    """Return a function from a query to a one-draw readout; call it with all queries, in order."""
    dtype = getattr(allowed, "dtype", None)
    is_array = dtype is not None and getattr(allowed, "ndim", 0) == 1
    is_array = is_array and not getattr(dtype, "hasobject", False)
    is_one = allowed is None or isinstance(allowed, PackedMask) or is_array
    for_all = allowed if is_one else None
    number_of, alike = _drawn_alike(vocab_size, for_all, options)
    mask = alike.pop("allowed")
    masks = [mask] * num_draws
    if not is_one:
        given: list[Any] = listed("allowed", allowed)
        are_ids = bool(given) and isinstance(given[0], (int, np.integer))
        if len(given) != num_draws or are_ids:
            raise OptionError(
                f"allowed must have one element (a mask, ids or None) for each of the {num_draws} "
                f"contexts, got {shown(given)}; to use the same ids for all, pass "
                "[ids] * len(contexts), or a mask as an array of bools"
            )
        may_fail = alike["may_fail"]
        masks = [
            packed_mask(own, vocab_size, may_fail, f"allowed[{i}]") for i, own in enumerate(given)
        ]
    pairs = iter([(number_of(), own) for own in masks])

    def made(query: RowQuery) -> SampleReadout:
        uniform, own = next(pairs)
        return SampleReadout(query, uniforms=(uniform,), allowed=own, **alike)

    return made


def _drawn_alike(
    vocab_size: int, allowed: Any, options: DrawOptions
) -> tuple[Callable[[], float], dict[str, Any]]:
    """Check options; return a source of random numbers, and the fields that all readouts share."""
    given = checked_options(DrawOptions, options, "option of draws", ("allowed", "lora_name"))
    generator, divisor, *cuts, impossible = given.values()
    number_of = uniform_of(generator)
    bounds, may_fail = SamplingFilter(*cuts), impossible == "return"
    mask = packed_mask(allowed, vocab_size, may_fail)
    return number_of if divisor else lambda: 0.0, {
        "temperature": divisor,
        "allowed": mask,
        "may_fail": may_fail,
        "cuts": None if bounds == SamplingFilter() or not divisor else bounds,
    }
