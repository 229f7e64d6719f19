"""Whether vLLM's rows of sessions are those of contexts that are computed whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Final

import torch

from genlm_backend.backends.vllm.release import installed_release
from genlm_backend.backends.vllm.vllm_evaluator import VLLMEvaluator
from genlm_backend.errors import UnsupportedModelError
from genlm_backend.model.query import Query

_FEWEST: Final = 12
_SHARE_OF_SPREAD: Final = 0.25
_ROUNDING: Final = 0.05


def compare_rows(evaluator: VLLMEvaluator) -> None:
    """Compare rows of contexts that are extended and forked with rows of the same ones asked whole.

    It takes a few passes of tens of tokens, on the model itself, and all is forgotten behind it. A
    difference counts where it is more than rounding in 16 bits, and more than a quarter of what one
    wrong token in the middle of a context makes.

    Args:
        evaluator: The evaluator, which nobody else uses meanwhile.

    Raises:
        UnsupportedModelError: (``ValueError``) If they differ.
    """
    engine, planner, generator = evaluator.engine, evaluator.planner, random.Random(0)
    size = min(3 * engine.block_size + 2, engine.max_length - 2, 200)
    if size < _FEWEST:  # too short a context to tell
        return
    first = [generator.randrange(engine.vocab_size) for _ in range(size)]
    other = [generator.randrange(engine.vocab_size) for _ in range(size)]
    middle = size // 2
    forks = [[*first[:middle], *other[i:size:3]] for i in range(3)]
    grown = [[*first, *other[:1]], [*forks[0], *other[1:2]], [*first, *other[2:3]]]
    wrong = [*first[:middle], (first[middle] + 1) % engine.vocab_size, *first[middle + 1 :]]

    def rows(contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        found = planner.evaluate([Query(ids) for ids in contexts], evaluator.check_wanted)
        return [row.logprobs.float() for row in found]

    def forgotten() -> None:
        planner.end_sessions()
        engine.reset()

    try:
        found = [*rows([first]), *rows(forks), *rows(grown)]
        contexts = [first, *forks, *grown]
        forgotten()
        expected = list[torch.Tensor]()
        for context in [*contexts, wrong]:
            expected += rows([context])
            forgotten()
        spread = _distance(expected[0], expected.pop())
        tolerance = max(_ROUNDING, _SHARE_OF_SPREAD * spread)
        difference = max(itertools.starmap(_distance, zip(found, expected, strict=True)))
    finally:
        forgotten()
        planner.tokens_computed = planner.tokens_reused = planner.tokens_evicted = 0
        engine.num_steps = 0
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"with vLLM {installed_release()}, rows of this model depend on what is cached: those "
            f"of extended and forked contexts differ by up to {difference:.2g} from whole ones "
            f"(one wrong token makes {spread:.2g}). Take another release, backend 'hf', or "
            "check_rows=False to run it all the same"
        )


def _distance(row: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two rows, among ids that either says may come.

    Where a large vocabulary has none that is likelier than others, it is among all of them.
    """
    likely = (row > _LEAST) | (other > _LEAST)
    differences = (row - other).abs()
    return float((differences[likely] if likely.any() else differences).max())


_LEAST: Final = -12.0
