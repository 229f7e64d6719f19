"""What is read off rows where the model is, beside whole rows, with a forward pass of no time."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
import torch
from tokenizers import Tokenizer, models

from benchmarks.workload import Numbers, Row, median
from genlm_backend import AsyncLM
from genlm_backend.llm import (
    BatchedLM,
    Context,
    ProcessEvaluator,
    RowQuery,
    StatelessEvaluator,
    rows_of_logits,
)
from genlm_backend.llm import Row as ModelRow

PLACES = {"here": "in this process", "process": "in another process"}
NUM_ROWS, WIDTH = 256, 128_256
_REPEATS = 7


class RandomRows(StatelessEvaluator):
    """Rows of random logits that take no time, whatever is asked."""

    def __init__(self, width: int, num_rows: int) -> None:
        super().__init__(width)
        generator = torch.Generator().manual_seed(0)
        self._rows = rows_of_logits(4 * torch.randn(num_rows, width, generator=generator))

    def evaluate(self, queries: Sequence[RowQuery]) -> list[ModelRow]:
        return self._rows[: len(queries)]


def _calls(lm: AsyncLM) -> dict[str, Callable[[Context], Awaitable[object]]]:
    generator = np.random.default_rng(0)
    allowed = np.arange(WIDTH) % 3 == 0
    others = torch.from_numpy(~allowed)

    async def row_and_draw(context: Context) -> int:
        row = await lm.next_token_logprobs(context)
        return lm.draw(row, generator=generator)

    async def row_and_masked_draw(context: Context) -> int:
        row = await lm.next_token_logprobs(context)
        return lm.draw(row.masked_fill_(others, -torch.inf), generator=generator)

    return {
        "rows": lm.next_token_logprobs,
        "top": partial(lm.next_token_top, k=20),
        "chosen": partial(lm.next_token_logprobs_of, chosen=[1, 2, 3]),
        "entropy": lm.next_token_entropy,
        "rows_draws": row_and_draw,
        "draws": partial(lm.draw_next_token, generator=generator),
        "rows_masked": row_and_masked_draw,
        "masked": partial(lm.draw_next_token, allowed=allowed, generator=generator),
    }


async def _seconds(lm: AsyncLM) -> dict[str, list[float]]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for repeat in range(_REPEATS):
        for name, call in _calls(lm).items():
            contexts = [lm.context([i, repeat]) for i in range(NUM_ROWS)]
            start = time.perf_counter()
            await asyncio.gather(*map(call, contexts))
            found[name].append(time.perf_counter() - start)
    return found


def measure() -> Numbers:
    """Measure steps of 256 awaits of each kind, in this process and from another one."""
    found: Numbers = {}
    make = partial(RandomRows, WIDTH, NUM_ROWS)
    words = {f"<{i}>": i for i in range(WIDTH)}
    for place in PLACES:
        evaluator = make() if place == "here" else ProcessEvaluator(make)
        options = {"batch_size": NUM_ROWS, "row_cache_bytes": 0, "self_check": False}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
        with BatchedLM(tokenizer, evaluator, **options) as lm:
            for name, seconds in asyncio.run(_seconds(lm)).items():
                found[f"{place}_{name}_ms"] = [1e3 * each for each in seconds[1:]]
    return found


def rows(numbers: Numbers) -> list[Row]:
    """Return the shares of a step by rows that steps by readouts take."""
    table = list[Row]()
    for place, where in PLACES.items():
        of_rows = median(numbers[f"{place}_rows_ms"])
        table.append((f"{NUM_ROWS} rows of {WIDTH:,} tokens, {where}", f"{of_rows:.0f} ms", ""))
        for name, beside, what, aim in (
            ("top", "rows", "20 top tokens of each, over rows", (0.4, 0.2)),
            ("chosen", "rows", "3 chosen tokens of each, over rows", None),
            ("entropy", "rows", "entropies, over rows", None),
            ("draws", "rows_draws", "draws, over rows and draws here", None),
            ("masked", "rows_masked", "draws from a mask, over rows and draws here", (None, 0.2)),
        ):
            share = median(numbers[f"{place}_{name}_ms"]) / median(numbers[f"{place}_{beside}_ms"])
            wanted = aim[place == "process"] if aim else None
            table.append((f"… {what}", f"{share:.2f}×", "" if wanted is None else f"{wanted}×"))
    return table
