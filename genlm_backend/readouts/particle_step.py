"""ParticleStep: the rows of a particle group as one query, in arrays.

The reference implementation of its draws is ``naive_draw`` in tests/naive.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.queries.context import Context
from genlm_backend.queries.query import Adapter, Query, RowQuery
from genlm_backend.readouts.draw import Draw
from genlm_backend.readouts.draw_table import Pools
from genlm_backend.readouts.sample_readout import SampleReadout
from genlm_backend.readouts.token_readouts import ReadoutOf


@final
@dataclass(frozen=True, slots=True, eq=False)
class TableDraws:
    """The ``N`` draws of a step.

    Attributes:
        pools: The pools of tokens to draw from.
        uniforms: A random number in [0, 1) for each draw: float64 ``[N]``.
        pool_of: Index of each draw's pool, ascending: int64 ``[N]``.
    """

    pools: Pools
    uniforms: NDArray[np.float64]
    pool_of: NDArray[np.int64]

    def readouts(self, contexts: Sequence[Context]) -> tuple[list[Context], ReadoutOf]:
        """Return each draw's context, and a function that makes the draws' readouts in order."""
        pools, number = self.pools, iter(range(len(self.uniforms)))
        pool_of, uniforms = self.pool_of.tolist(), self.uniforms.tolist()

        def made(query: RowQuery) -> SampleReadout:
            draw = next(number)
            pool = pool_of[draw]
            mask = None
            if pools.masks is not None and pools.mask_of is not None and pools.mask_of[pool] >= 0:
                mask = pools.masks[pools.mask_of[pool]].tobytes()
            bounds = None if pools.bounds is None else pools.bounds[pool]
            divisor = float(pools.temperatures[pool])
            return SampleReadout(query, divisor, (uniforms[draw],), mask, True, bounds)

        return [contexts[row] for row in pools.rows[self.pool_of].tolist()], made


def numbers_of_draws(draws: Sequence[tuple[Draw]]) -> NDArray[np.float64]:
    """Return draws, one in each tuple, as an array in the form that ``Pools.draw`` returns."""
    rows = [(*draw, -math.inf if draw.token_id < 0 else 0.0) for (draw,) in draws]
    return np.array(rows, np.float64).reshape(-1, 5)


class StepResult(NamedTuple):
    """The result of a step of ``R`` rows, over ``V`` token ids.

    Attributes:
        values: The numbers of ``Pools.draw`` for ``N`` draws, float64 ``[N, 5]``; without draws,
            the rows, float32 ``[R, V]`` on the model's device, not to be modified.
        hints: Number of the cache node of each row's context, for the next step; 0 if the context
            is not cached: int64 ``[R]``.
        hint_key: Identifies the state of the cache in which the hints are valid.
    """

    values: Any
    hints: NDArray[np.int64]
    hint_key: object


def drawn_from_rows(steps: Sequence[ParticleStep], rows: Sequence[StepResult]) -> list[StepResult]:
    """Return the results of steps that draw, given results whose values are the steps' rows."""
    pairs = zip(steps, rows, strict=True)
    return [own._replace(values=step.values(own.values)) for step, own in pairs]


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepContexts:
    """The contexts of a step's ``R`` rows, made when they are needed.

    Attributes:
        prompts: The prompts, each of one group of particles.
        groups: Index of each row's prompt: int64 ``[R]``.
        tokens: Up to ``T`` tokens after the prompt, of each of ``N`` particles: int32 ``[N, T]``.
        rows: Index of each row's particle: int64 ``[R]``.
        sizes: Number of each row's tokens after its prompt: int64 ``[R]``.
        hints: Numbers of cached nodes, as in ``StepResult``: int64 ``[R]``.
        hint_key: The state of the cache in which the hints are valid.
    """

    prompts: Sequence[Context]
    groups: NDArray[np.int64]
    tokens: NDArray[np.int32]
    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    hints: NDArray[np.int64]
    hint_key: object

    def context(self, index: int) -> Context:
        """Return the context of a row."""
        context, size = self.prompts[self.groups[index]], self.sizes[index]
        if size:
            context = context.followed_by(self.tokens[self.rows[index], :size].tobytes())
        if self.hints[index]:
            context.cache_hint = self.hint_key, int(self.hints[index])
        return context

    def followed_by(self, next_ids: NDArray[np.int64]) -> StepContexts:
        """Return the contexts, each with its element of ``next_ids``, ``[R]``, appended."""
        rows, width = np.arange(len(self.rows)), self.sizes.max(initial=0)
        tokens = np.pad(self.tokens[self.rows, :width], ((0, 0), (0, 1)))
        tokens[rows, self.sizes] = next_ids
        return replace(self, tokens=tokens, rows=rows, sizes=self.sizes + 1)

    def __reduce__(self) -> tuple[type[StepContexts], tuple[Any, ...]]:
        own = self.tokens[self.rows, : self.sizes.max(initial=0)]  # only of particles with rows
        numbers, groups = np.unique(self.groups, return_inverse=True)
        prompts = [self.prompts[i] for i in numbers.tolist()]
        rows = np.arange(len(own))
        return StepContexts, (prompts, groups, own, rows, self.sizes, self.hints, self.hint_key)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ParticleStep(Query):
    """``R`` contexts, and what to compute from their rows.

    Attributes:
        hints: A node number for each row, as in ``StepResult``; 0 if none is known: int64 ``[R]``.
        hint_key: The state of the cache in which the hints are valid.
        lengths: Lengths of the contexts: int32 ``[R]``.
        tokens: Last tokens of the contexts: int32 ``[R]``.
        contexts: The contexts.
        draws: What to draw; ``None`` to return the rows themselves.
        has_pictures: Whether any prompt of the ``ParticleGroup`` has pictures.
        adapter: The adapter to read the contexts with, or ``None`` for the base model.
    """

    hints: NDArray[np.int64]
    hint_key: object
    lengths: NDArray[np.int32]
    tokens: NDArray[np.int32]
    contexts: StepContexts
    draws: TableDraws | None = None
    has_pictures: bool = False
    adapter: Adapter | None = None
    wanted: ClassVar[str] = "a StepResult for a ParticleStep"
    needs_row: ClassVar[bool] = True  # computed from rows, on the rows' device

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def context(self) -> Context:
        """The context of the first row."""
        return self.contexts.context(0)

    @property
    def weight(self) -> float:
        """The number of rows."""
        return float(len(self))

    @property
    def forward_key(self) -> Query:
        """The step itself."""
        return self

    def is_answered_by(self, answer: Any, vocab_size: int) -> bool:
        """Return whether ``answer`` is the result of a step."""
        return isinstance(answer, StepResult)

    def are_sound(self, values: Any) -> NDArray[np.bool_]:
        """Return which rows have no NaN, as far as the step's values show: bool ``[R]``."""
        if self.draws is None:
            return ~values[:, 0].isnan().cpu().numpy()  # one NaN makes all of the row NaN
        are_sound = np.ones(len(self), np.bool_)
        pools, pool_of = self.draws.pools, self.draws.pool_of
        are_sound[pools.rows[pool_of[np.isnan(values[:, 4])]]] = False
        return are_sound

    def row_queries(self) -> list[RowQuery]:
        """Return a query for each row."""
        return [RowQuery(self.contexts.context(i), self.adapter) for i in range(len(self))]

    def values(self, table: torch.Tensor, *, are_logits: bool = False) -> Any:
        """Return the result's ``values``, given ``table``, the step's rows: float32 ``[R, V]``."""
        if self.draws is None:
            return table
        draws = self.draws
        return draws.pools.draw(table, draws.uniforms, draws.pool_of, are_logits=are_logits)

    @property
    def takes_logits(self) -> bool:
        """Whether ``values`` may be given logits instead of log-probabilities."""
        return self.draws is not None and self.draws.pools.are_plain
