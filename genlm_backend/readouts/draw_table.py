"""Draws from a table of rows by inverting cumulative sums, with few waits for a GPU.

The reference implementation is ``naive_draw`` in tests/naive.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.queries.row import moved
from genlm_backend.readouts.draw import Doubles, Floats, TokenArray
from genlm_backend.readouts.token_readouts import log_sums


class SamplingFilter(NamedTuple):
    """Bounds on the tokens to draw from, named like the options of ``generate``."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def kept(self, scores: Floats, weights: Floats) -> TokenArray:
        """Return the indices of the tokens within the bounds: int64 ``[n]``."""
        # Top-k compares scores, not weights: at a low temperature, many weights underflow to zero,
        # but distinct draws can reach those tokens once all others have been drawn.
        is_left = scores > -np.inf
        if 0 < self.top_k < len(scores):
            is_left &= scores >= np.partition(scores, -self.top_k)[-self.top_k]
        least = self.min_p
        if self.top_p < 1:
            least = max(least, float(_least_of_nucleus(weights[is_left], self.top_p)))
        if least > 0:
            is_left &= weights >= least
        return np.flatnonzero(is_left)


def _least_of_nucleus(weights: Floats, share: float) -> np.float32:
    bound, size = share * weights.sum(dtype=np.float64), _FEW_OF_NUCLEUS
    while True:
        size = min(size, len(weights))
        # The 512 largest usually suffice, and sorting all weights takes ten times as long.
        largest = np.sort(np.partition(weights, len(weights) - size)[len(weights) - size :])[::-1]
        before = np.cumsum(largest, dtype=np.float64) - largest
        num_kept = int(np.searchsorted(before, bound, side="left"))
        if num_kept < size or size == len(weights):
            return largest[max(num_kept, 1) - 1]
        size *= 8


_FEW_OF_NUCLEUS: Final = 512

Bounds: TypeAlias = Sequence[SamplingFilter | None]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """The ``P`` pools to draw tokens from: rows, each with a temperature, bounds and a mask.

    Draws of one pool share its cumulative sum.

    Attributes:
        rows: Index of each pool's row in the table: int64 ``[P]``.
        temperatures: Divisors of the log-probabilities, float64 ``[P]``; 0 takes the first of the
            most probable tokens.
        bounds: Bounds on the tokens of each pool; ``None`` without any.
        masks: ``M`` masks of which of ``V`` tokens are allowed, in the bit order of
            ``numpy.packbits``: uint8 ``[M, ceil(V / 8)]``; ``None`` without any.
        mask_of: Index of each pool's mask, int64 ``[P]``; -1 allows all tokens.
    """

    rows: NDArray[np.int64]
    temperatures: Doubles
    bounds: Bounds | None = None
    masks: NDArray[np.uint8] | None = None
    mask_of: NDArray[np.int64] | None = None

    @property
    def are_plain(self) -> bool:
        """Whether there are no masks and no bounds, and all temperatures are 1."""
        is_bounded = self.masks is not None or self.bounds is not None
        return not is_bounded and bool((self.temperatures == 1).all())

    def draw(
        self,
        table: torch.Tensor,
        uniforms: Doubles,
        pool_of: NDArray[np.int64],
        *,
        are_logits: bool = False,
    ) -> Doubles:
        """Draw one token for each random number, from the pool that ``pool_of`` gives.

        Args:
            table: ``R`` rows of log-probabilities or other scores, float32 ``[R, V]``, on any
                device. If ``are_plain``, they may be logits.
            uniforms: ``N`` numbers in [0, 1): float64 ``[N]``.
            pool_of: Index of each draw's pool, ascending: int64 ``[N]``.
            are_logits: Whether ``table`` has logits; if so, the returned scores are normalised.

        Returns:
            For each draw, float64 ``[N, 5]``: the token id, its score, the log-mass of the tokens
            that were drawn from, the log-probability of the draw, and the pool's largest score. If
            the largest score is not finite, no token can be drawn, and the rest means nothing.
        """
        if not len(self.rows):
            return np.empty((0, 5))
        if table.device.type == "mps":  # a device without float64
            table = table.cpu()
        width, device = table.shape[1], table.device
        size = max(1, _NUMBERS_ON_CPU // width) if table.is_cpu else _ROWS_ON_DEVICE
        starts = list(range(0, len(self.rows), size))
        cuts = np.searchsorted(pool_of, np.array([*starts, len(self.rows)])).tolist()
        points = moved(torch.from_numpy(uniforms), device)
        places = moved(torch.from_numpy(pool_of), device)
        found = list[torch.Tensor]()
        for k, start in enumerate(starts):
            own = slice(cuts[k], cuts[k + 1])
            chunk = slice(start, start + size)
            found.append(self._drawn(table, chunk, points[own], places[own] - start, are_logits))
        return moved(torch.cat(found), _HOST).numpy()

    def _drawn(
        self,
        table: torch.Tensor,
        own: slice,
        points: torch.Tensor,
        pool_of: torch.Tensor,
        are_logits: bool,
    ) -> torch.Tensor:
        """Draw from a slice of the pools; plain draws of consecutive rows do not wait for a GPU."""
        device = table.device
        # 1. Scores: the pools' rows, with -inf for tokens that are not allowed.
        indices = self.rows[own]
        first, num = int(indices[0]), len(indices)
        is_run = int(indices[-1]) == first + num - 1 and bool((np.diff(indices) == 1).all())
        rows = table[first : first + num] if is_run else table[torch.from_numpy(indices).to(device)]
        scores, is_bounded = rows, False
        if self.masks is not None and self.mask_of is not None and (self.mask_of[own] >= 0).any():
            scores, is_bounded = rows.masked_fill(~self._unpacked(own, table), -torch.inf), True
        # 2. Weights, relative to the largest score, at each pool's temperature.
        largest = scores.amax(-1, keepdim=True)
        weights, temperatures = scores - largest, self.temperatures[own]
        are_plain, is_greedy = bool((temperatures == 1).all()), temperatures == 0
        if not are_plain:
            # An impossible token's -inf / inf would be NaN.
            finite = np.minimum(temperatures, np.finfo(np.float64).max)
            divisors = torch.from_numpy(np.where(is_greedy, 1.0, finite)).to(device)
            weights = (weights.double() / divisors[:, None]).float()
        weights.exp_()
        cuts = None if self.bounds is None else self.bounds[own]
        if cuts is not None and any(cuts):
            is_cut = ~_within(cuts, scores, weights)
            scores, is_bounded = scores.masked_fill(is_cut, -torch.inf), True
            weights.masked_fill_(is_cut, 0)
        # 3. Tokens, from the cumulative sums of the weights.
        token_ids, totals = _inverted(weights, points, pool_of)
        if is_greedy.any():
            greedy = torch.from_numpy(is_greedy).to(device)[pool_of]
            token_ids = torch.where(greedy, scores.argmax(-1)[pool_of], token_ids)
        # 4. Log-probabilities of the tokens and of their draws.
        top, tempered = largest[:, 0].double(), totals.log()
        if are_logits:  # a log-softmax of infinite logits would be NaN, too
            top = torch.where(top.isfinite(), top, torch.nan)
        log_allowed = torch.zeros_like(top)
        if is_bounded:
            # Summed in one go, in float64, to compare with the sum of the whole row.
            sums = weights.sum(1, dtype=torch.float64)
            log_allowed = top + sums.log() if are_plain else log_sums(scores)
            log_allowed = _without_rounding(log_allowed, rows)
        logprobs = rows[pool_of, token_ids].double()
        if are_logits:  # the sum of the weights normalises them: no log-softmax is needed
            logprobs = (logprobs - (top + tempered)[pool_of]).clamp(max=0)
        if are_plain:
            log_proposals = logprobs - log_allowed[pool_of]
        else:
            divisors = torch.from_numpy(np.where(is_greedy, 1.0, temperatures)).to(device)
            log_proposals = (logprobs - top[pool_of]) / divisors[pool_of] - tempered[pool_of]
            is_one = torch.from_numpy(temperatures == 1).to(device)[pool_of]
            log_proposals = torch.where(is_one, logprobs - log_allowed[pool_of], log_proposals)
            log_proposals[torch.from_numpy(is_greedy).to(device)[pool_of]] = 0
        columns = [token_ids.double(), logprobs, log_allowed[pool_of], log_proposals.clamp(max=0)]
        return torch.stack([*columns, top[pool_of]], 1)

    def _unpacked(self, own: slice, table: torch.Tensor) -> torch.Tensor:
        """Return which tokens each of the ``p`` pools in ``own`` allows: bool ``[p, V]``."""
        assert self.masks is not None
        assert self.mask_of is not None
        mask_of, width = self.mask_of[own], table.shape[1]
        if table.is_cpu:
            packed = self.masks[np.maximum(mask_of, 0)]
            bits = np.unpackbits(packed, axis=1, count=width)
            bits[mask_of < 0] = 1
            return torch.from_numpy(bits.view(np.bool_))
        distinct, inverse = np.unique(mask_of, return_inverse=True)
        packed = self.masks[np.maximum(distinct, 0)]
        packed[distinct < 0] = 255
        bytes_ = moved(torch.from_numpy(packed), table.device)[:, :, None]
        shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=table.device)
        bits = ((bytes_ >> shifts) & 1).flatten(1)[:, :width].bool()
        return bits[moved(torch.from_numpy(inverse), table.device)]


_HOST: Final = torch.device("cpu")
_NUMBERS_ON_CPU: Final = 1 << 20  # 4 MB of float32, which fit into the processor's cache
_ROWS_ON_DEVICE: Final = 256


def _without_rounding(log_allowed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return log-masses, at most 0, and exactly 0 for pools that have all mass of their rows."""
    if log_allowed.is_cpu:
        near = (log_allowed.abs() < ROUNDING).nonzero()[:, 0]
        if len(near):
            is_all = (log_allowed[near] - log_sums(rows[near])).abs() < REORDERED
            log_allowed[near[is_all]] = 0
    else:  # branching on the numbers would wait for the device
        is_all = (log_allowed - log_sums(rows)).abs() < REORDERED
        log_allowed = torch.where((log_allowed.abs() < ROUNDING) & is_all, 0.0, log_allowed)
    return log_allowed.clamp(max=0)


ROUNDING: Final = 5e-5
"""Bound on a logsumexp's rounding error (6e-7 in this library, 2e-5 in torch.log_softmax)."""

REORDERED: Final = 1e-12
"""Bound on the difference between float64 log-sums of the same terms in different orders."""


def _inverted(
    weights: torch.Tensor, points: torch.Tensor, pool_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each draw's token, by its pool's cumulative weights, and each pool's weight sum."""
    # Search block sums first, then one block: a cumulative sum over the vocabulary would take
    # several times as long as a plain sum. Both searches are in float64, which keeps the rarest
    # tokens from rounding away. A block's float32 sum has a relative error of about 1e-7.
    width = weights.shape[1]
    num_blocks = math.isqrt(width)
    size = width // num_blocks
    whole = num_blocks * size
    sums = weights[:, :whole].unflatten(1, (num_blocks, size)).sum(2)
    sums = torch.cat([sums, weights[:, whole:].sum(1, keepdim=True)], 1).double()
    ends = sums.cumsum(1)
    totals, of_draw = ends[:, -1], ends[pool_of]
    targets = points * totals[pool_of]
    block = _passed(of_draw, sums, pool_of, targets)
    before = of_draw.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0]
    begins = torch.where(block > 0, before, 0.0)
    places = block[:, None] * size + torch.arange(size, device=weights.device)
    inside = weights[pool_of[:, None], places.clamp(max=width - 1)]
    inside = torch.where(places < width, inside, 0.0)
    own_ends = inside.cumsum(1, dtype=torch.float64)
    shares = (targets - begins) / sums[pool_of, block]  # NaN in rows without any weight
    numbers = torch.arange(len(places), device=weights.device)
    place = _passed(own_ends, inside, numbers, shares * own_ends[:, -1])
    return (block * size + place).clamp(max=width - 1), totals


def _passed(
    ends: torch.Tensor, weights: torch.Tensor, row_of: torch.Tensor, points: torch.Tensor
) -> torch.Tensor:
    """Return the first interval that ends after each point: int64 ``[n]``."""
    # A zero-width interval ends where the one before it ends, so the search never finds it.
    found = torch.searchsorted(ends, points[:, None], right=True)[:, 0]
    num = ends.shape[1]
    if found.is_cpu and not (found == num).any():
        return found
    # Rounding may put the point after the last interval of nonzero width.
    numbers = torch.arange(num, device=ends.device)
    return torch.minimum(found, torch.where(weights > 0, numbers, 0).amax(1)[row_of])


def _within(cuts: Bounds, scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return which tokens are within bounds: bool ``[n, vocab]``; see ``SamplingFilter.kept``."""
    device, vocab_size = scores.device, scores.shape[1]
    bounds = [SamplingFilter() if own is None else own for own in cuts]
    is_left = scores > -torch.inf
    rows = [i for i, own in enumerate(bounds) if 0 < own.top_k < vocab_size]
    if rows:
        sizes = torch.tensor([[bounds[i].top_k - 1] for i in rows], dtype=torch.int64)
        largest = scores[rows].topk(int(sizes.max()) + 1, -1).values
        is_left[rows] &= scores[rows] >= largest.gather(1, sizes.to(device))
    least = torch.tensor([own.min_p for own in bounds], dtype=torch.float32).to(device)
    rows = [i for i, own in enumerate(bounds) if own.top_p < 1]
    if rows:
        shares = torch.tensor([bounds[i].top_p for i in rows], dtype=torch.float64).to(device)
        of_nucleus = _least_of_nuclei(torch.where(is_left[rows], weights[rows], 0.0), shares)
        least[rows] = torch.maximum(least[rows], of_nucleus)
    return is_left & (weights >= least[:, None])


def _least_of_nuclei(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the least weight in each row's top-p nucleus: float32 ``[n]``."""
    points, size = shares * weights.sum(-1, dtype=torch.float64), _FEW_OF_NUCLEUS
    while True:
        size = min(size, weights.shape[1])
        largest = weights.topk(size, -1).values
        before = largest.double().cumsum(1) - largest
        num_kept = (before < points[:, None]).sum(1)
        if size == weights.shape[1] or int(num_kept.max()) < size:
            return largest.gather(1, (num_kept[:, None] - 1).clamp(min=0))[:, 0]
        size *= 8
