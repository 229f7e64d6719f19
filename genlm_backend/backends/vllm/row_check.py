"""Whether vLLM's rows of sessions are those of contexts that are computed whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import torch

from genlm_backend.backends.vllm.release import installed_release
from genlm_backend.backends.vllm.vllm_evaluator import VLLMEvaluator
from genlm_backend.errors import UnsupportedModelError
from genlm_backend.queries.query import RowQuery

_FEWEST: Final = 16
_ROUNDING: Final = 0.05
_NUM_OWN: Final = 3  # tokens of a fork behind those that it shares


def compare_rows(evaluator: VLLMEvaluator) -> None:
    """Compare rows of extended and forked contexts with the same contexts computed whole."""
    engine, planner, generator = evaluator.engine, evaluator.planner, random.Random(0)
    size = min(3 * engine.block_size + 2, engine.max_length - _NUM_OWN - 1, 200)
    if size < _FEWEST:  # too short a context to tell
        return
    first, other = ([generator.randrange(engine.vocab_size) for _ in range(size)] for _ in "12")
    own = [other[i : i + _NUM_OWN] for i in range(0, 3 * _NUM_OWN, _NUM_OWN)]
    points = [size // 3, size // 2, 3 * size // 4]
    forks = [[*first[:point], *tail] for point, tail in zip(points, own, strict=True)]
    grown = [[*first, other[-1]], [*first, other[-2]], [*forks[0], other[-3]]]
    contexts, num_kept = [*forks, *grown], [*points, size, size, len(forks[0])]

    def rows(contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        found = planner.evaluate([RowQuery(ids) for ids in contexts], evaluator.check_cancelled)
        return [row.logprobs.float() for row in found]

    def forgotten() -> None:
        planner.end_sessions()
        engine.reset()

    try:
        rows([first])
        found = [*rows(forks), *rows(grown)]
        forgotten()
        expected = list[torch.Tensor]()
        for context in contexts:
            expected += rows([context])
            forgotten()
        wrong = [
            [*ids[: kept - 1], (ids[kept - 1] + 1) % engine.vocab_size, *ids[kept:]]
            for ids, kept in zip(contexts, num_kept, strict=True)
        ]
        spreads = [*map(_distance, rows(wrong), expected)]
    finally:
        forgotten()
        planner.tokens_computed = planner.tokens_reused = planner.tokens_evicted = 0
        engine.num_steps = 0
    differences = [*map(_distance, found, expected)]
    # A difference counts if it is more than half of that of a wrong last cached token: in 16 bits
    # rounding makes a root mean square of 0.05 through all layers, and such a token 0.3.
    for difference, spread in zip(differences, spreads, strict=True):
        if not difference <= max(_ROUNDING, spread / 2):
            raise UnsupportedModelError(
                f"with vLLM {installed_release()}, rows of this model depend on what is cached: "
                "log-probabilities of an extended or forked context differ from those of the same "
                f"one computed whole, by a root mean square of {difference:.2g} (one wrong token "
                f"makes {spread:.2g}). Take engine_opts={{'enforce_eager': True}} or "
                "{'dtype': 'float32'}, another release, backend 'hf', or check_rows=False to run "
                "it all the same"
            )


def _distance(row: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root mean square difference of two rows, among ids that either finds likely."""
    # Among all ids if no id is likely; infinite if one row alone excludes an id.
    likely = (row > _LEAST) | (other > _LEAST)
    row, other = (row[likely], other[likely]) if likely.any() else (row, other)
    return float((row - other).square().mean().sqrt())


_LEAST: Final = -12.0
