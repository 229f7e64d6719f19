"""A model in a process of its own beside one in this process, while Python computes here."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.systems import PROMPT_TOKENS, TEXT
from benchmarks.workload import Numbers, Row
from genlm_backend import AsyncLM, AsyncTransformer
from genlm_backend.llm import AsyncReplicas, ProcessEvaluator, RowQuery, StatelessEvaluator
from genlm_backend.llm import Row as ModelRow

PYTHON_SECONDS = 0.03
"""What each step of a run computes in Python."""
WIDTH = 49_152
PLACES = {"here": "in this process", "process": "`process=True`"}


class ReadyRows(StatelessEvaluator):
    """Rows that take no time."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._rows = [ModelRow(torch.zeros(width).log_softmax(-1), 0.0) for _ in range(100)]

    def evaluate(self, queries: Sequence[RowQuery]) -> list[ModelRow]:
        return self._rows[: len(queries)]


def load(place: str, num_threads: int | None = None) -> AsyncTransformer:
    """Load the bundled model, here or in a process of its own."""
    is_elsewhere = place == "process"
    return AsyncTransformer.from_name(
        "smollm2", process=is_elsewhere, num_threads=num_threads, row_cache_bytes=0, batch_size=64
    )


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


async def walk(
    lm: AsyncLM, prompt: list[int], num_particles: int, num_tokens: int, seed: int
) -> None:
    """Sample with particles that await by themselves."""

    async def particle(stream: np.random.Generator) -> None:
        context = list(prompt)
        for _ in range(num_tokens):
            context.append(lm.draw(await lm.next_token_logprobs(context), generator=stream))

    streams = [np.random.default_rng([seed, i]) for i in range(num_particles)]
    await asyncio.gather(*map(particle, streams))


async def steps_with_python(
    lm: AsyncTransformer, prompt: list[int], seed: int, num_particles: int = 10, num_steps: int = 12
) -> None:
    """Sample with particles in step, and compute in Python after each."""
    streams = [np.random.default_rng([seed, i]) for i in range(num_particles)]
    contexts = [list(prompt) for _ in streams]
    for _ in range(num_steps):
        rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
        for context, row, stream in zip(contexts, rows, streams, strict=True):
            context.append(lm.draw(row, generator=stream))
        end = time.perf_counter() + PYTHON_SECONDS
        compute(lambda end=end: time.perf_counter() > end)


def compute(is_over: Callable[[], bool]) -> None:
    while not is_over():
        sum(i * i for i in range(2000))


def measure() -> Numbers:
    """Measure both places, in turns."""
    numbers: Numbers = {"row ms": milliseconds_of_a_row()}
    with load("here") as here, load("process") as there:
        prompt = here.tokenizer.encode(TEXT)[:PROMPT_TOKENS]
        for seed in range(7):
            for place, lm in (("here", here), ("process", there)):
                lm.clear_cache()
                took = seconds_of(partial(asyncio.run, walk(lm, prompt, 20, 16, seed)))
                numbers.setdefault(f"{place}, sis s", []).extend([took] if seed else [])
    for place in PLACES:
        with load(place, 1) as lm:
            _beside_python(lm, prompt, numbers, place)
            for seed in range(3):
                for way in (apart, together):
                    lm.clear_cache()
                    lm.cache_kv(prompt)
                    took = seconds_of(partial(asyncio.run, way(lm, prompt, seed)))
                    numbers.setdefault(f"{place}, {way.__name__} s", []).append(took)
    return numbers


def measure_replicas() -> Numbers:
    """Two replicas with a thread each beside one model with one thread, in turns."""
    numbers: Numbers = {"one s": [], "two s": []}
    options: dict[str, Any] = {"num_threads": 1, "row_cache_bytes": 0, "batch_size": 64}
    with (
        AsyncTransformer.from_name("smollm2", process=True, **options) as one,
        AsyncReplicas.from_name("smollm2", 2, **options) as two,
    ):
        prompt = one.tokenizer.encode(TEXT)[:PROMPT_TOKENS]
        for seed in range(6):
            for name, lm in (("one s", one), ("two s", two)):
                lm.clear_cache()
                took = seconds_of(partial(asyncio.run, walk(lm, prompt, 64, 16, seed)))
                numbers[name] += [took] if seed else []
    return numbers


def measure_ray() -> Numbers:
    """One replica on a local Ray cluster beside a model in a process of its own, in turns."""
    cores = os.cpu_count() or 1
    numbers: Numbers = {"process s": [], "ray s": []}
    options: dict[str, Any] = {"num_threads": cores, "row_cache_bytes": 0, "batch_size": 64}
    with (
        AsyncTransformer.from_name("smollm2", process=True, **options) as process,
        AsyncReplicas.on_ray("smollm2", 1, num_cpus=cores, **options) as ray,
    ):
        prompt = process.tokenizer.encode(TEXT)[:PROMPT_TOKENS]
        for seed in range(8):
            for name, lm in (("process s", process), ("ray s", ray)):
                lm.clear_cache()
                took = seconds_of(partial(asyncio.run, walk(lm, prompt, 20, 16, seed)))
                numbers[name] += [took] if seed else []
    return numbers


def ray_rows(numbers: Numbers) -> list[Row]:
    """Return how fast a replica on Ray is."""
    ratio = statistics.median(numbers["process s"]) / statistics.median(numbers["ray s"])
    return [("SIS, one replica on Ray over `process=True`", f"{ratio:.2f}×", "0.8×")]


def replica_rows(numbers: Numbers) -> list[Row]:
    """Return how much faster two replicas are."""
    ratio = statistics.median(numbers["one s"]) / statistics.median(numbers["two s"])
    what = "SIS of 64 particles, two replicas of one thread each over one of one thread"
    return [(what, f"{ratio:.2f}×", "1.3×")]


async def apart(lm: AsyncTransformer, prompt: list[int], seed: int) -> None:
    """Two runs one after the other."""
    for run in range(2):
        await steps_with_python(lm, prompt, 2 * seed + run)


async def together(lm: AsyncTransformer, prompt: list[int], seed: int) -> None:
    """The same two runs side by side."""
    await asyncio.gather(*(steps_with_python(lm, prompt, 2 * seed + run) for run in range(2)))


def _beside_python(lm: AsyncTransformer, prompt: list[int], numbers: Numbers, place: str) -> None:
    alone, busy = (numbers.setdefault(f"{place}, {name} ms", []) for name in ("alone", "busy"))
    lm.next_token_logprobs_sync(prompt)
    particles = [[*prompt] for _ in range(10)]

    def step() -> float:
        for i, particle in enumerate(particles):
            particle.append(1000 + i)
        return 1e3 * seconds_of(lambda: lm.batch_next_token_logprobs_sync(particles))

    for _ in range(3):
        alone += [step() for _ in range(8)]
        is_over = threading.Event()
        thread = threading.Thread(target=compute, args=[is_over.is_set])
        thread.start()
        busy += [step() for _ in range(8)]
        is_over.set()
        thread.join()


def milliseconds_of_a_row(num_rows: int = 20) -> list[float]:
    """What a row costs more than one of a single number, from an evaluator that has it ready."""
    times: dict[int, list[float]] = {}
    queries = [RowQuery([i]) for i in range(num_rows)]
    for width in (1, WIDTH):
        evaluator = ProcessEvaluator(partial(ReadyRows, width))
        evaluator.open()
        times[width] = [seconds_of(lambda e=evaluator: e.evaluate(queries)) for _ in range(60)][10:]
        evaluator.close()
    shortest = statistics.median(times[1])
    return [1e3 * (took - shortest) / num_rows for took in times[WIDTH]]


def rows(numbers: Numbers) -> list[Row]:
    """Return what a process of its own gains, and what it costs."""

    def ratio(place: str, above: str, below: str) -> float:
        over, under = numbers[f"{place}, {above}"], numbers[f"{place}, {below}"]
        return statistics.median(over) / statistics.median(under)

    table: list[Row] = []
    for place, label in PLACES.items():
        what = f"a step while another thread computes in Python, over alone, {label}"
        table.append((what, f"{ratio(place, 'busy ms', 'alone ms'):.2f}×", _aim(place, "1.15×")))
        what = f"two runs with 30 ms of Python a step, side by side over one by one, {label}"
        table.append((what, f"{ratio(place, 'apart s', 'together s'):.2f}×", _aim(place, "1.4×")))
    speed = statistics.median(numbers["here, sis s"]) / statistics.median(numbers["process, sis s"])
    table.append(("SIS, `process=True` over in this process", f"{speed:.2f}×", "0.95×"))
    cost = statistics.median(numbers["row ms"])
    table.append((f"what a row of {WIDTH:,} costs on its way", f"{cost:.3f} ms", "0.1 ms"))
    return table


def _aim(place: str, aim: str) -> str:
    return aim if place == "process" else ""
