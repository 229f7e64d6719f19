"""Trial passes of a model without a prefix tree, and the distances between their rows.

The backends for transformers and MLX share this module; each passes its own runner and pools.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch

from genlm_backend.attention.cascade_plan import CachedPrefixes
from genlm_backend.attention.forward_batch import Runner, TokenChunk, pack

_ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05}

MOST_ROUNDING: Final = 0.25
"""Largest result of ``rounding``: for bfloat16. ``bounds`` uses it for quantised models too."""


def rounding(dtype: torch.dtype) -> float:
    """Return the largest distance of rows that counts as rounding in a dtype."""
    return _ROUNDING.get(dtype, MOST_ROUNDING)


def row_of(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of logits, in float32 on the CPU."""
    return logits.float().log_softmax(-1).cpu()


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the root mean square difference of two rows, or of two tables of rows."""
    return float((first - second).square().mean().sqrt())


def farthest(distances: Iterable[float]) -> float:
    """Return the largest distance; NaN counts as infinite."""
    return max(math.inf if math.isnan(one) else one for one in distances)


NUM_STATES: Final = 16
"""Size of a pool of states that suffices for all passes of a trial."""

_TIMES: Final = 20
"""Factor by which distances may be larger if tokens run at once instead of one by one."""


def paths_of(pasts: Sequence[Sequence[int]]) -> CachedPrefixes:
    """Return the ``CachedPrefixes`` of rows from ``pasts``, the slots of their cached tokens."""
    numbers: dict[tuple[int, int], int] = {}  # nodes by parent and slot
    parent, depth, slot, ends = [0], [0], [0], list[int]()
    for past in pasts:
        node = 0
        for number, own in enumerate(past, 1):
            before, node = node, numbers.setdefault((node, own), len(parent))
            if node == len(parent):
                parent.append(before)
                depth.append(number)
                slot.append(own)
        ends.append(node)
    above, depths, slots = (np.array(values, np.int32) for values in (parent, depth, slot))
    return CachedPrefixes(above, depths, slots, np.array(ends, np.int64))


def difference_of(
    runner: Runner,
    attention: Any,
    states: Any,
    contexts: Sequence[list[int]],
    whole: Sequence[torch.Tensor],
    rounding: float,
) -> tuple[float, bool]:
    """Return the error of cached rows, and whether a pass may add several tokens to a row."""
    (long, short), (long_row, short_row) = contexts, whole
    if states is not None:
        trial = _StateTrial(runner, states, attention)
        return trial.found(long, short, long_row, short_row, rounding)
    # Each of two passes is a padded batch; the second one continues the long context in two rows.
    size = len(long) + len(short)
    long_slots, short_slots = range(1, len(long) + 1), range(len(long) + 1, size + 1)
    first = [TokenChunk(long[:-2], long_slots[:-2]), TokenChunk(short[:1], short_slots[:1])]
    runner.forward(pack(first), attention)
    second = [
        TokenChunk(long[-2:], long_slots[-2:], (1,)),
        TokenChunk(short[1:], short_slots[1:], (len(short) - 2,)),
        TokenChunk(long[-2:], range(size + 1, size + 3), (1,)),
    ]
    past = paths_of([long_slots[:-2], short_slots[:1], long_slots[:-2]])
    rows = row_of(runner.forward(pack(second, past), attention))
    return farthest(map(distance, rows, (long_row, short_row, long_row))), True


_Begun: TypeAlias = tuple[tuple[int, ...], int]
"""Slots of a context's first tokens, and the number of the state after them."""


@final
class _StateTrial:
    """Trial passes of a model with recurrent states, with equally many new tokens in all rows."""

    def __init__(self, runner: Runner, states: Any, attention: Any) -> None:
        self._runner, self._states, self._attention = runner, states, attention
        self._num_slots = self._num_states = 0

    def found(
        self,
        long: list[int],
        short: list[int],
        long_row: torch.Tensor,
        short_row: torch.Tensor,
        rounding: float,
    ) -> tuple[float, bool]:
        """Return the error of cached rows, and whether a pass may add several tokens to a row."""
        ((before,), _), ((shorter,), _) = (self.go_on([None], [c[:-2]]) for c in (long, short))
        (first,), _ = self.go_on([None], [short[:1]])
        # One pass adds many tokens to a state. Then a batch of three rows, of which two continue
        # the same state, adds two tokens to each row: first at once, and again one by one.
        begun, contexts = (before, shorter, before), (long, short, long)
        _, many = self.go_on([first], [short[1:]])
        _, several = self.go_on(begun, [context[-2:] for context in contexts])
        ends, _ = self.go_on(begun, [context[-2:-1] for context in contexts])
        _, last = self.go_on(ends, [context[-1:] for context in contexts])
        wanted = [long_row, short_row, long_row]
        at_once = farthest(
            [distance(row_of(many)[0], short_row), *map(distance, row_of(several), wanted)]
        )
        one_by_one = farthest(map(distance, row_of(last), wanted))
        # A scan over several tokens may ignore the state before them. If so, tokens run one by one.
        takes_several = at_once <= max(rounding, _TIMES * one_by_one)
        difference = max(at_once, one_by_one) if takes_several else one_by_one
        return difference, takes_several

    def go_on(
        self, before: Sequence[_Begun | None], tokens: Sequence[list[int]]
    ) -> tuple[list[_Begun], torch.Tensor]:
        """Run the contexts' next tokens; ``before`` has only ``_Begun``s, or only ``None``s."""
        spans: list[TokenChunk] = []
        for ids in tokens:
            first = self._num_slots + 1
            self._num_slots += len(ids)
            spans.append(TokenChunk(ids, range(first, first + len(ids)), (len(ids) - 1,)))
        pasts = [() if one is None else one[0] for one in before]
        known = [one[1] for one in before if one is not None]
        of_rows = self._states.read(np.array(known)) if known else None
        states = self._runner.running_states(self._states.layout, of_rows)
        logits = self._runner.forward(pack(spans, paths_of(pasts), states), self._attention)
        numbers = np.arange(len(spans)) + self._num_states + 1
        self._num_states += len(spans)
        self._states.write(numbers, states.behind(np.arange(len(spans))))
        begun = [
            ((*past, *span.slots), number)
            for past, span, number in zip(pasts, spans, numbers.tolist(), strict=True)
        ]
        return begun, logits
