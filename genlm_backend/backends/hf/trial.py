"""Trial: two short contexts computed whole and from slots, and how far their rows are apart."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from genlm_backend.attention.attention_backend import AttentionFactory
from genlm_backend.attention.forward_batch import TokenChunk, pack
from genlm_backend.backends.hf.cascade_attention import ATTENTION_FACTORIES, UncachedAttention
from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.rows_apart import MOST_ROUNDING, distance, farthest, rounding, row_of
from genlm_backend.backends.hf.state_trial import NUM_STATES, StateTrial, paths_of, rows_from_slots
from genlm_backend.prefix.kv_pool import KVLayout, KVPool
from genlm_backend.prefix.state_cache import StatePool

logger = logging.getLogger(__name__)

_SHARE_OF_SPREAD: Final = 0.1
_SHARE_OF_SPREAD_QUANTISED: Final = 0.3  # 8-bit activations: one rounding flips the next


def bounds(model: Any, dtype: torch.dtype | None = None) -> tuple[float, float]:
    """Return the largest difference of equal rows, and its share of the spread of others."""
    if getattr(model, "is_quantized", False):
        return MOST_ROUNDING, _SHARE_OF_SPREAD_QUANTISED
    own = next((p.dtype for p in model.parameters()), torch.float32)
    return rounding(dtype or own), _SHARE_OF_SPREAD


@dataclass(frozen=True, slots=True)
class Expected:
    """Two contexts and their rows, computed whole."""

    long: list[int]
    short: list[int]
    long_row: torch.Tensor
    short_row: torch.Tensor
    third: torch.Tensor
    spread: float


def expected_rows(runner: HFRunner, long: list[int], other: list[int], vocab_size: int) -> Expected:
    """Compute the rows of one context and of half of another, whole."""
    short = other[: len(other) // 2]
    wrong = [*long[:-3], (long[-3] + 1) % vocab_size, *long[-2:]]
    last = (len(long) - 1,)
    # One pass for all: of one length, so that nothing is padded. What follows ``short`` takes no
    # part in its row, or the row from slots, where nothing follows, is another one.
    whole = runner.forward(
        [
            TokenChunk(long, outputs=(2, *last)),
            TokenChunk(wrong, outputs=last),
            TokenChunk(other, outputs=(len(short) - 1,)),
        ],
        UncachedAttention(),
    )
    third, long_row, wrong_row, short_row = row_of(whole)
    return Expected(long, short, long_row, short_row, third, distance(wrong_row, long_row))


def tolerance_of(runner: HFRunner, layout: KVLayout, spread: float) -> float:
    """Return the distance up to which two rows are the same one."""
    smallest, share = bounds(runner.model, dtype_of(layout))
    return max(smallest, share * spread)


def dtype_of(layout: KVLayout) -> torch.dtype:
    """Return the type of a model's keys, values or states, as it computes them."""
    return layout.layers[0].dtype if layout.layers else layout.states.tensors[0].dtype


def difference_of(
    runner: HFRunner, layout: KVLayout, factory: AttentionFactory, expected: Expected
) -> tuple[float, bool]:
    """Return how far rows from slots are from whole ones, and if several tokens go on at once."""
    long, short = expected.long, expected.short
    wanted = expected.long_row, expected.short_row, expected.long_row
    if layout.states:
        pool = KVPool(layout, 4 * (len(long) + len(short)))
        states = StatePool(layout.states, NUM_STATES)
        trial = StateTrial(runner, states, factory.probing(pool))
        return trial.found(long, short, *wanted[:2], rounding(dtype_of(layout)))
    pool = KVPool(layout, len(long) + len(short) + 2)
    rows = rows_from_slots(runner, factory.probing(pool), long, short)
    return farthest(map(distance, rows, wanted)), True


def first_factory(
    runner: HFRunner, layout: KVLayout, expected: Expected, tolerance: float
) -> tuple[AttentionFactory | None, float, bool]:
    """Return the first way whose rows are the expected ones, and its findings or the last ones."""
    difference, takes_several = math.inf, True
    for factory in ATTENTION_FACTORIES:
        if factory.uses_interface and not layout.layers:
            continue
        runner.view.name_attention(factory.uses_interface)
        try:
            difference, takes_several = difference_of(runner, layout, factory, expected)
        except Exception as error:  # third-party model code may raise anything
            if factory is ATTENTION_FACTORIES[-1]:
                raise
            logger.debug("%s cannot attend so", type(runner.model).__name__, exc_info=error)
            continue
        if difference <= tolerance:
            return factory, difference, takes_several
    return None, difference, takes_several


def spread_alone(
    runner: HFRunner, layout: KVLayout, factory: AttentionFactory, expected: Expected
) -> float:
    """Return how far the row of a token computed alone is from the expected one; 0 in rounding."""
    # Some kernels of quantised models compute one row in another precision than many; other models
    # only add sums up in another order.
    if layout.states or not getattr(runner.model, "is_quantized", False):
        return 0.0
    *before, last = expected.long
    attention = factory.probing(KVPool(layout, len(expected.long)))
    slots = range(1, len(expected.long) + 1)
    runner.forward([TokenChunk(before, slots[:-1])], attention)
    batch = pack([TokenChunk([last], slots[-1:], (0,))], paths_of([slots[:-1]]))
    (row,) = row_of(runner.forward(batch, attention))
    spread = distance(row, expected.long_row)
    return spread if spread > rounding(layout.layers[0].dtype) else 0.0
