"""What a step costs behind a long context: shared by all particles, and by none."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.limit import Pass, program_seconds
from benchmarks.workloads import load_ours

SHARED = ((20, 51), (20, 512), (32, 512), (20, 4096), (4, 4096))
"""Particles, and tokens that they share."""
APART = (4, 4096)
"""Contexts that share nothing, and the tokens of each."""


def model(way: str) -> Any:
    """Load SmolLM2, which reads what is shared once, or copies each row's past ("gathered")."""
    from genlm_backend.backends.hf import support

    if way == "gathered":
        support.ATTENTION_FACTORIES = support.ATTENTION_FACTORIES[-1:]
    lm = load_ours(batch_size=32, row_cache_bytes=0, kv_cache_bytes=2 << 30)
    name = type(lm._evaluator.scheduler.cache.attention).__name__
    assert (name == "GatherAttention") == (way == "gathered")
    return lm


def measure(
    way: str,
    repeats: int,
    shared: tuple[tuple[int, int], ...] = SHARED,
    apart: tuple[int, int] = APART,
) -> dict[str, Any]:
    """Seconds of a step of each kind, what it must at least take, and MB beyond the slots."""
    lm, generator = model(way), random.Random(0)

    def ids(count: int) -> list[int]:
        return [generator.randrange(1000, 40_000) for _ in range(count)]

    def steps(contexts: list[list[int]]) -> list[float]:
        found = []
        for _ in range(8 * repeats + 2):
            for context in contexts:
                context.append(generator.randrange(1000, 40_000))
            start = time.perf_counter()
            lm.batch_next_token_logprobs_sync(contexts)
            found.append(time.perf_counter() - start)
        return found[2:]

    numbers: dict[str, Any] = {}
    for num_particles, num_shared in shared:
        lm.clear_cache()
        prompt = ids(num_shared)
        lm.next_token_logprobs_sync(prompt)
        contexts = [list(prompt) for _ in range(num_particles)]
        key = f"{num_shared} x {num_particles}"
        numbers[f"{key} s"] = steps(contexts)
        numbers[f"{key} MB"] = [_megabytes(lambda contexts=contexts: steps(contexts))]
        limit = [Pass(num_particles, num_particles, num_shared)]
        numbers[f"{key} limit s"] = [program_seconds(lm.model, limit)]
    lm.clear_cache()
    num_contexts, size = apart
    contexts = [ids(size) for _ in range(num_contexts)]
    for context in contexts:
        lm.next_token_logprobs_sync(context)
    numbers["apart s"] = steps(contexts)
    numbers["apart limit s"] = [
        program_seconds(lm.model, [Pass(num_contexts, num_contexts, num_contexts * size)])
    ]
    lm.close()
    return numbers


def _megabytes(function: Any) -> float:
    """Return by how much the most memory of a call exceeds what was in use before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before) / 1e3


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def rows(found: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return a line for each kind of step."""
    shared, gathered = found["shared"], found["gathered"]
    table = []

    def median(numbers: dict[str, Any], key: str) -> float:
        return statistics.median(numbers[f"{key} s"])

    first = median(shared, f"{SHARED[0][1]} x {SHARED[0][0]}")
    for num_particles, num_shared in SHARED:
        key = f"{num_shared} x {num_particles}"
        ours = median(shared, key)
        what = f"A step of {num_particles} particles behind {num_shared:,} shared tokens"
        cells = f"{1e3 * ours:.0f} ms"
        cells += f" (copied: {1e3 * median(gathered, key):.0f} ms;"
        cells += f" at least {1e3 * median(shared, f'{key} limit'):.0f} ms;"
        cells += f" {statistics.median(shared[f'{key} MB']):.0f} MB beyond the slots)"
        table.append((what, cells, ""))
        if num_particles == SHARED[0][0] and num_shared != SHARED[0][1]:
            aim = {512: "1.15×", 4096: "1.8×"}[num_shared]
            table.append(("… over one behind 51", f"{ours / first:.2f}×", aim))
    ours, theirs = median(shared, "apart"), median(gathered, "apart")
    what = f"A step of {APART[0]} contexts of {APART[1]:,} tokens that share nothing"
    cells = f"{1e3 * ours:.0f} ms ({ours / theirs:.2f}× of copying them)"
    table.append((what, cells, "0.5×"))
    return table
