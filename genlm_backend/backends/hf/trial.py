"""Trial: two short contexts computed whole and from slots, and how far their rows are apart."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from genlm_backend.attention.attend import Way
from genlm_backend.attention.packing import Span, pack
from genlm_backend.attention.paths import Paths
from genlm_backend.attention.torch import WAYS, TorchRowStates, WholeAttend
from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.rows_apart import MOST_ROUNDING, distance, farthest, rounding, row_of
from genlm_backend.backends.hf.state_trial import (
    NUM_STATES,
    StateTrial,
    past_of,
    paths_of,
    running_states,
)
from genlm_backend.prefix import KVLayout, KVStore, StateStore

logger = logging.getLogger(__name__)

_SHARE_OF_SPREAD: Final = 0.1
_SHARE_OF_SPREAD_QUANTISED: Final = 0.3  # 8-bit activations: one rounding flips the next
_MOST_COLUMNS: Final = 1 << 20
_COPIED_BYTES: Final = 1 << 27  # of one layer's keys and values at a time
_ALIGNMENT: Final = 1024
_SHARE_OF_ROUNDING: Final = 0.02


def bounds(model: Any) -> tuple[float, float]:
    """Return the largest difference of equal rows, and its share of the spread of others."""
    if getattr(model, "is_quantized", False):
        return MOST_ROUNDING, _SHARE_OF_SPREAD_QUANTISED
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return rounding(dtype), _SHARE_OF_SPREAD


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
            Span(long, outputs=(2, *last)),
            Span(wrong, outputs=last),
            Span(other, outputs=(len(short) - 1,)),
        ],
        WholeAttend(),
    )
    third, long_row, wrong_row, short_row = row_of(whole)
    return Expected(long, short, long_row, short_row, third, distance(wrong_row, long_row))


def tolerance_of(runner: HFRunner, layout: KVLayout, spread: float) -> float:
    """Return the distance up to which two rows are the same one."""
    is_quantised = getattr(runner.model, "is_quantized", False)
    share = _SHARE_OF_SPREAD_QUANTISED if is_quantised else _SHARE_OF_SPREAD
    smallest = MOST_ROUNDING if is_quantised else rounding(dtype_of(layout))
    return max(smallest, share * spread)


def dtype_of(layout: KVLayout) -> torch.dtype:
    """Return the type that a model computes what is kept of it in."""
    return layout.layers[0].dtype if layout.layers else layout.states.tensors[0].dtype


@dataclass(frozen=True, slots=True)
class Trial:
    """Two contexts whose first tokens are in slots, and the rest of them."""

    runner: HFRunner
    way: Way
    store: KVStore
    spans: tuple[Span, ...]
    past: Paths
    rows: torch.Tensor
    difference: float
    states: Callable[[], TorchRowStates | None] = lambda: None
    takes_several_tokens: bool = True

    @classmethod
    def begun(cls, runner: HFRunner, layout: KVLayout, way: Way, expected: Expected) -> Self:
        """Compute the first tokens of both contexts, and then the rest of them."""
        if layout.states:
            return cls._from_states(runner, layout, way, expected)
        long, short = expected.long, expected.short
        size = len(long) + len(short)
        store = KVStore(layout, size + 2)
        long_slots, short_slots = range(1, len(long) + 1), range(len(long) + 1, size + 1)
        first = [Span(long[:-2], long_slots[:-2]), Span(short[:1], short_slots[:1])]
        runner.forward(first, way.probing(store, 0))
        past = paths_of([long_slots[:-2], short_slots[:1], long_slots[:-2]])
        spans = (
            Span(long[-2:], long_slots[-2:], (1,)),
            Span(short[1:], short_slots[1:], (len(short) - 2,)),
            Span(long[-2:], range(size + 1, size + 3), (1,)),
        )
        rows = row_of(runner.forward(pack(spans, past), way.probing(store, 0)))
        wanted = expected.long_row, expected.short_row, expected.long_row
        return cls(runner, way, store, spans, past, rows, farthest(map(distance, rows, wanted)))

    @classmethod
    def _from_states(cls, runner: HFRunner, layout: KVLayout, way: Way, expected: Expected) -> Self:
        """Compute them where passes go on from running states, of which each row has its own."""
        long, short = expected.long, expected.short
        store = KVStore(layout, 4 * (len(long) + len(short)))
        states = StateStore(layout.states, NUM_STATES)
        trial = StateTrial(runner, states, way.probing(store, 0))
        rows = expected.long_row, expected.short_row
        found = trial.found(long, short, *rows, rounding(dtype_of(layout)))
        return cls(
            runner,
            way,
            store,
            found.spans,
            past_of(found.before),
            found.rows,
            found.difference,
            lambda: running_states(runner, states, found.before),
            found.takes_several_tokens,
        )

    def again(self, wider: int) -> torch.Tensor:
        """Return the rows of the rest in a pass with so many columns more."""
        batch = pack(self.spans, self.past, self.states())
        return row_of(self.runner.forward(batch, self.way.probing(self.store, wider)))

    def change(self, wider: int) -> float:
        """Return how far rows are from before in a pass with so many columns more."""
        return distance(self.again(wider), self.rows)


def first_trial(
    runner: HFRunner, layout: KVLayout, expected: Expected, tolerance: float
) -> tuple[Trial | None, float]:
    """Return the first way's trial whose rows are the expected ones, and the last distance."""
    difference = math.inf
    for way in WAYS:
        if way.is_called and not layout.layers:
            continue
        runner.twin.name_attention(way.is_called)
        try:
            trial = Trial.begun(runner, layout, way, expected)
            difference = trial.difference
        except Exception as error:  # third-party model code may raise anything
            if way is WAYS[-1]:
                raise
            logger.debug("%s cannot attend so", type(runner.model).__name__, exc_info=error)
            continue
        if difference <= tolerance:
            return trial, difference
    return None, difference


def counts_columns(trial: Trial, max_length: int | None) -> bool:
    """Return whether rows change beside a context that is far longer.

    A model is told how many columns a pass has before the new tokens, which is as many as the
    longest past, and where each row's tokens stand among its own. Some count by the first number:
    they scale attention by it, or cut it out of a table. Rows that have as many past tokens each
    are right all the same. A trial that is as wide as passes can be sees what no context of a few
    tokens would: a scale that is 1 for the first 8,192 columns, a table that ends.
    """
    layers = trial.store.layout.layers
    if not layers:
        return False
    dtype = layers[0].dtype
    wider = min(2 * (max_length or _MOST_COLUMNS), _MOST_COLUMNS)
    if trial.way.copies:
        num_bytes = trial.store.bytes_per_slot // len(layers)
        wider = min(wider, _COPIED_BYTES // (num_bytes * len(trial.spans)))
    wider = -(-wider // _ALIGNMENT) * _ALIGNMENT  # or kernels add up in another order
    try:
        change = trial.change(wider)
        if change <= _SHARE_OF_ROUNDING * rounding(dtype):
            return False
        return change > 4 * trial.change(0)  # some devices add up in any order
    except Exception as error:  # third-party model code may raise anything
        name = type(trial.runner.model).__name__
        logger.debug("%s takes no longer past", name, exc_info=error)
        return True


def spread_alone(runner: HFRunner, layout: KVLayout, way: Way, expected: Expected) -> float:
    """Return how far the row of a token computed alone is from the expected one; 0 in rounding.

    It is asked of quantised models: some of their kernels compute one row in another precision than
    many. Of other ones, sums are added up in another order.
    """
    if layout.states or not getattr(runner.model, "is_quantized", False):
        return 0.0
    *before, last = expected.long
    attend = way.probing(KVStore(layout, len(expected.long)), 0)
    slots = range(1, len(expected.long) + 1)
    runner.forward([Span(before, slots[:-1])], attend)
    batch = pack([Span([last], slots[-1:], (0,))], paths_of([slots[:-1]]))
    (row,) = row_of(runner.forward(batch, attend))
    spread = distance(row, expected.long_row)
    return spread if spread > rounding(layout.layers[0].dtype) else 0.0
