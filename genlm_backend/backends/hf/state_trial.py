"""Passes of a trial, of contexts in no tree: what they have cached, and recurrent states.

They are those of any library: a runner makes the states of a pass, and a pool keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch

from genlm_backend.attention.cached_prefixes import CachedPrefixes
from genlm_backend.attention.forward_batch import TokenChunk, pack
from genlm_backend.backends.hf.rows_apart import distance, farthest, row_of
from genlm_backend.scheduling.forwards import Runner

NUM_STATES: Final = 16
"""States of a pool that are enough for all passes of a trial."""

_TIMES: Final = 20
"""Rows so many times farther off than others are computed in another way, beyond rounding."""


def paths_of(pasts: Sequence[Sequence[int]]) -> CachedPrefixes:
    """Return the paths of rows given the slots of what each has cached, of contexts in no tree."""
    numbers: dict[tuple[int, int], int] = {}  # of nodes, by the one above and the slot
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


def rows_from_slots(
    runner: Runner, attention: Any, long: list[int], short: list[int]
) -> torch.Tensor:
    """Return rows of two contexts and the first again, in two steps and padded to one batch."""
    size = len(long) + len(short)
    long_slots, short_slots = range(1, len(long) + 1), range(len(long) + 1, size + 1)
    first = [TokenChunk(long[:-2], long_slots[:-2]), TokenChunk(short[:1], short_slots[:1])]
    runner.forward(first, attention)
    second = [
        TokenChunk(long[-2:], long_slots[-2:], (1,)),
        TokenChunk(short[1:], short_slots[1:], (len(short) - 2,)),
        TokenChunk(long[-2:], range(size + 1, size + 3), (1,)),
    ]
    past = paths_of([long_slots[:-2], short_slots[:1], long_slots[:-2]])
    return row_of(runner.forward(pack(second, past), attention))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """The first tokens of a context, which have gone through the model."""

    past: tuple[int, ...]
    state: int


@final
class StateTrial:
    """Passes of a model with recurrent states, whose rows have as many new tokens each."""

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
        """Return how far rows from states are from whole ones, and if they take several tokens."""
        ((before,), _), ((shorter,), _) = (self.go_on([None], [c[:-2]]) for c in (long, short))
        (first,), _ = self.go_on([None], [short[:1]])
        # Two rows go on from one state, in a batch with another context, by two tokens at once and
        # one by one; and many tokens go on from one.
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
        # Some scans begin anew whatever state there is, so that tokens have to come one by one.
        takes_several = at_once <= max(rounding, _TIMES * one_by_one)
        difference = max(at_once, one_by_one) if takes_several else one_by_one
        return difference, takes_several

    def go_on(
        self, before: Sequence[Begun | None], tokens: Sequence[list[int]]
    ) -> tuple[list[Begun], torch.Tensor]:
        """Run the next tokens of contexts, all of which begin or none."""
        spans = self._spans(tokens)
        past = paths_of([() if one is None else one.past for one in before])
        known = [one.state for one in before if one is not None]
        of_rows = self._states.read(np.array(known)) if known else None
        states = self._runner.running_states(self._states.layout, of_rows)
        logits = self._runner.forward(pack(spans, past, states), self._attention)
        numbers = np.arange(len(spans)) + self._num_states + 1
        self._num_states += len(spans)
        self._states.write(numbers, states.behind(np.arange(len(spans))))
        begun = [
            Begun((*(() if one is None else one.past), *span.slots), number)
            for one, span, number in zip(before, spans, numbers.tolist(), strict=True)
        ]
        return begun, logits

    def _spans(self, tokens: Sequence[list[int]]) -> list[TokenChunk]:
        """Return spans of the next tokens of contexts, with slots of their own."""
        spans: list[TokenChunk] = []
        for ids in tokens:
            first = self._num_slots + 1
            self._num_slots += len(ids)
            spans.append(TokenChunk(ids, range(first, first + len(ids)), (len(ids) - 1,)))
        return spans
