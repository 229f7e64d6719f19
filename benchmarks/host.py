"""What a step costs the host: everything but the forward pass, by the length of the context."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch

from benchmarks.workloads import free_forward, seconds, tokenizer_of
from genlm_backend.attention.cascade_plan import FEW_TOKENS, CachedPrefixes, CascadePlan
from genlm_backend.batching import Batcher, BatchPolicy
from genlm_backend.llm import BatchedLM, Row, StatelessEvaluator
from genlm_backend.queries.row import rows_of_logits

Numbers = dict[str, Any]

NUM_PARTICLES = 100
AT_ONCE = (20, 100, 1000)
SIZES = (40, 1000, 4000)
MANY = (64, 256, 1024)


def host(repeats: int, num_steps: int = 20) -> Numbers:
    """Milliseconds of a step of 100 particles behind one prompt, with a forward that is free.

    Each particle has a few last tokens of its own and gets one more a step. ``list`` asks plain
    lists, ``context`` what ``lm.context`` returns. ``plan`` is what planning how to read the
    cached tokens of such a step takes beside that.
    """
    lm = free_forward(max_length=10_000, kv_cache_bytes=1 << 26, row_cache_bytes=1 << 20)
    last_batch = _remembering(lm)
    numbers: Numbers = {}

    async def ask(contexts: list[Any]) -> None:
        await asyncio.gather(*map(lm.next_token_logprobs, contexts))

    async def steps(contexts: list[Any], is_list: bool) -> list[float]:
        await ask(contexts)
        found = []
        for step in range(num_steps):
            token, start = (7 * step) % 1000, time.perf_counter()
            if is_list:
                for context in contexts:
                    context.append(token)
            else:
                contexts = [context.extend(token) for context in contexts]
            await ask(contexts)
            found.append(1e3 * (time.perf_counter() - start))
        return found

    for _ in range(repeats):
        for size in SIZES:
            prompt = [(31 * i) % 1000 for i in range(size - 5)]
            own = [[*divmod(i, 10), 5, 6, 7] for i in range(NUM_PARTICLES)]
            behind = lm.context(prompt)
            asked = {
                "list": [prompt + ids for ids in own],
                "context": [behind + ids for ids in own],
            }
            for kind, contexts in asked.items():
                lm.clear_cache()
                found = asyncio.run(steps(contexts, kind == "list"))
                numbers.setdefault(f"{kind}, {size}", []).extend(found)
                plan = [_milliseconds_of_reading(last_batch[0]) for _ in range(3)]
                numbers.setdefault(f"reading, {size}", []).extend(plan)
    lm.close()
    return numbers


def many(repeats: int, num_steps: int = 100) -> Numbers:
    """Milliseconds of a step of many particles, with a forward that is free.

    Each particle is asked by an ``await`` of its own, or all by one call. Garbage is looked for
    with what was loaded, or, "frozen", without. Every step counts, since few of them pay for that.
    A "wide" step is of a model of thirty layers and 49,152 logits. "draws" are one call of draws,
    and "group" a step of a particle group. CPU time is told too.
    """
    numbers: Numbers = {}
    for _ in range(repeats):
        for kind in ("await", "call", "draws", "group", "await, frozen", "call, wide"):
            if kind.endswith("frozen"):
                gc.collect()
                gc.freeze()
            for count in MANY:
                steps = num_steps // 5 if kind.endswith("wide") else num_steps
                wall, cpu = asyncio.run(_steps_of_many(count, kind, steps))
                numbers.setdefault(f"{kind}, {count}", []).append(wall)
                numbers.setdefault(f"{kind}, {count}, cpu", []).append(cpu)
            gc.unfreeze()
    return numbers


def plan(repeats: int) -> Numbers:
    """Milliseconds to decide how a step reads what is cached.

    ``anew`` and ``stepped`` are of 256 rows behind 4,000 shared tokens with 100 of their own, half
    of them gone on from by others. ``forked`` and ``unforked`` are of 32 rows behind a lineage of
    2,000 tokens, from each of which another context goes on or none.
    """
    wide = _behind(4000, False, 256, 100)
    lineages = {name: _behind(2000, name == "forked", 32, 1) for name in ("forked", "unforked")}
    ones = np.ones(256, np.int64)
    made = CascadePlan.of(wide, ones, FEW_TOKENS)
    rows, slots = np.arange(256) // 2, np.arange(256)
    timed: dict[str, Callable[[], object]] = {
        "anew": lambda: CascadePlan.of(wide, ones, FEW_TOKENS),
        "stepped": lambda: made.advanced(rows, slots),
        **{
            name: partial(CascadePlan.of, past, ones[:32], FEW_TOKENS)
            for name, past in lineages.items()
        },
    }
    for call in timed.values():  # compiled once
        call()
    return {
        name: [1e3 * seconds(call) for _ in range(20 * repeats)] for name, call in timed.items()
    }


def _behind(num_shared: int, is_forked: bool, num_rows: int, num_own: int) -> CachedPrefixes:
    """Return paths of rows that share tokens and have others of their own.

    Args:
        num_shared: Number of tokens that all have.
        is_forked: Whether each of these has another child, in the slot after it.
        num_rows: Number of rows.
        num_own: Number of tokens of each row, which came a step after another.
    """
    size = 1 + is_forked
    shared = np.arange(num_shared) * size + 1
    own = shared[-1] + size + np.arange(num_rows * num_own)
    parent, depth = np.zeros((2, own[-1] + 1), np.int32)
    parent[shared[1:]], depth[shared] = shared[:-1], np.arange(1, num_shared + 1)
    if is_forked:
        parent[shared + 1], depth[shared + 1] = shared, depth[shared] + 1
    parent[own] = np.concatenate([[shared[-1]] * num_rows, own[:-num_rows]])
    depth[own] = num_shared + 1 + np.arange(len(own)) // num_rows
    return CachedPrefixes(parent, depth, np.arange(len(parent), dtype=np.int32), own[-num_rows:])


async def _steps_of_many(count: int, kind: str, num_steps: int) -> tuple[float, float]:
    """Return the mean milliseconds of a step, and those of CPU time."""
    wide = {"vocab_size": 49_152, "num_layers": 30} if kind.endswith("wide") else {}
    lm = free_forward(kv_cache_bytes=1 << 28, row_cache_bytes=0, batch_size=count, **wide)
    behind = lm.context([(31 * i) % 1000 for i in range(500)])
    own = [[*divmod(i, 100), 5] for i in range(count)]
    contexts = [behind + ids for ids in own]
    group = lm.particles(behind, count, seed=0)
    group.append(np.arange(count) % 1000)
    for step in range(num_steps + 5):
        if step == 5:
            start, cpu = time.perf_counter(), time.process_time()
        if kind == "group":
            draws = await group.draw()
            group.append(draws.token_ids)
            group.reweight(draws.log_increments)
            group.resample()
            continue
        if kind == "draws":
            drawn = await lm.batch_draw_next_token(contexts)
            contexts = [c.extend(own.token_id) for c, own in zip(contexts, drawn, strict=True)]
            continue
        contexts = [context.extend((7 * step) % 1000) for context in contexts]
        if kind.startswith("call"):
            await lm.batch_next_token_logprobs(contexts)
        else:
            await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    taken = time.perf_counter() - start, time.process_time() - cpu
    lm.close()
    return 1e3 * taken[0] / num_steps, 1e3 * taken[1] / num_steps


def awaited(repeats: int) -> Numbers:
    """Microseconds of CPU and of wall time of a query, an ``await`` each, evaluated for nothing.

    ``asyncio`` is what the tasks take alone, each waiting for a future of its own; ``batcher`` a
    ``Batcher``, ``model`` a ``BatchedLM`` whose rows of 1,000 are there already, ``kept`` the same
    with room for rows, and ``padded`` one in whose rows the last 24 ids are no token's.
    """
    numbers: Numbers = {}
    for count in AT_ONCE * repeats:
        steps = max(60, 6000 // count)
        for name, started in _asked(count).items():
            with contextlib.ExitStack() as stack:
                ask, asked = started(stack)
                wall, cpu = asyncio.run(_microseconds(ask, asked, count, steps))
            numbers.setdefault(f"{name}, {count}, cpu", []).extend(cpu)
            numbers.setdefault(f"{name}, {count}, wall", []).extend(wall)
    return numbers


Ask = Callable[[Any], Coroutine[Any, Any, Any]]
Started = tuple[Ask, Callable[[int], Iterable[Any]]]
"""What asks one thing, and what returns the things to ask at a step."""


async def _microseconds(
    ask: Ask, asked: Callable[[int], Iterable[Any]], count: int, num_steps: int
) -> tuple[list[float], list[float]]:
    wall: list[float] = []
    cpu: list[float] = []
    for step in range(num_steps + 5):
        queries = asked(step)
        start, before = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(ask, queries))
        if step >= 5:
            wall.append(1e6 * (time.perf_counter() - start) / count)
            cpu.append(1e6 * (time.process_time() - before) / count)
    return wall, cpu


def _asked(count: int) -> dict[str, Callable[[contextlib.ExitStack], Started]]:
    """Return what is measured, and how it is started."""

    def numbered(step: int) -> Iterable[int]:
        return range(step * count, (step + 1) * count)

    def tasks(stack: contextlib.ExitStack) -> Started:
        waiting: list[asyncio.Future[None]] = []

        def settle() -> None:
            for future in waiting:
                future.set_result(None)
            waiting.clear()

        async def wait(_: int) -> None:
            loop = asyncio.get_running_loop()
            waiting.append(loop.create_future())
            if len(waiting) == count:
                loop.call_soon(settle)
            await waiting[-1]

        return wait, numbered

    def batcher(stack: contextlib.ExitStack) -> Started:
        made: Batcher[int, int] = Batcher(list, BatchPolicy(max_batch_size=count))
        stack.callback(made.close)
        return made.submit, numbered

    def model(stack: contextlib.ExitStack, width: int = 1000, num_bytes: int = 0) -> Started:
        table = rows_of_logits(torch.zeros(count, width), undefined_ids=range(1000, width))
        lm = stack.enter_context(
            BatchedLM(
                tokenizer_of(1000), _Ready(table), batch_size=count, row_cache_bytes=num_bytes
            )
        )
        contexts = [lm.context([1, 2, 3, i % 1000]) for i in range(count)]

        def extended(step: int) -> list[Any]:
            contexts[:] = [context.extend((7 * step) % 1000) for context in contexts]
            return contexts

        return lm.next_token_logprobs, extended

    return {
        "asyncio": tasks,
        "batcher": batcher,
        "model": model,
        "kept": partial(model, num_bytes=1 << 26),
        "padded": partial(model, width=1024),
    }


@final
class _Ready(StatelessEvaluator):
    """Rows that are there already."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(len(rows[0].logprobs))
        self._rows = rows

    def evaluate(self, queries: Sequence[Any]) -> list[Row]:
        return self._rows[: len(queries)]


def _remembering(lm: Any) -> list[Any]:
    """Have the free forward remember what it was given last, packed; return where."""
    forward, last = lm._hf.scheduler.runner.forward, [None]

    def remembering(batch: Any, attend: Any) -> torch.Tensor:
        last[0] = batch
        return forward(batch, attend)

    lm._hf.scheduler.runner.forward = remembering
    return last


def _milliseconds_of_reading(batch: Any) -> float:
    start = time.perf_counter()
    CascadePlan.of(batch.past, batch.num_new, FEW_TOKENS)
    return 1e3 * (time.perf_counter() - start)
