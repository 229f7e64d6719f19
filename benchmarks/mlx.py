"""Particles on AsyncMlxLM, beside the same on AsyncTransformer."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from typing import Any, Final

import torch

from benchmarks.systems import DEVICE, PROMPT_TOKENS, TEXT, RowSystem

SYSTEMS = ("AsyncMlxLM", "AsyncMlxLM, copied", "AsyncTransformer")
SHARED = (51, 512, 2048)
"""Tokens that 20 particles share."""
_PRELOADED: Final = "LD_PRELOAD"
NUM_PARTICLES, NUM_TOKENS, NUM_STEPS = 20, 16, 6


class _Particles(RowSystem):
    def __init__(self, system: str) -> None:
        self._system = system

    def start(self, num_particles: int) -> list[int]:
        from genlm_backend import load_model_by_name

        self.lm = load_model_by_name(
            "smollm2",
            backend="hf" if self._system == "AsyncTransformer" else "mlx",
            llm_opts={"row_cache_bytes": 0, "batch_size": num_particles, "self_check": False},
        )
        if self._system == "AsyncMlxLM, copied":
            self.lm._evaluator.scheduler.cache.attention._few_tokens = 1 << 40
        if self._system == "AsyncTransformer" and DEVICE[0] != "cpu":
            self.lm.model.to(DEVICE[0])
        return self.lm.tokenizer.encode(TEXT)[:PROMPT_TOKENS]


def measure(system: str) -> dict[str, Any]:
    """Tokens per second of SIS, and seconds of a step behind shared tokens."""
    if system == "AsyncTransformer" and os.environ.get(_PRELOADED):
        return _without_preloading(system)
    it, random_ids = _Particles(system), random.Random(0)
    prompt = it.start(NUM_PARTICLES)
    numbers: dict[str, Any] = {"device": _device(system), "tokens_per_second": []}
    it.sample(prompt, NUM_PARTICLES, 2, 0)
    for seed in range(2):
        start = time.perf_counter()
        count = it.sample(prompt, NUM_PARTICLES, NUM_TOKENS, seed)
        numbers["tokens_per_second"].append(count / (time.perf_counter() - start))
    for size in SHARED:
        it.lm.clear_cache()
        shared = random_ids.choices(range(1000, 40_000), k=size)
        it.lm.next_token_logprobs_sync(shared)
        contexts = [list(shared) for _ in range(NUM_PARTICLES)]
        found = []
        for _ in range(NUM_STEPS):
            for context in contexts:
                context.append(random_ids.randrange(1000, 40_000))
            start = time.perf_counter()
            it.lm.batch_next_token_logprobs_sync(contexts)
            found.append(time.perf_counter() - start)
        numbers[f"{size} s"] = found[2:]
    it.lm.close()
    return numbers


def _without_preloading(system: str) -> dict[str, Any]:
    """Measure a system in a process in which no other BLAS is loaded first, which is MLX's."""
    code = f"import json; from benchmarks import mlx; print(json.dumps(mlx.measure({system!r})))"
    environment = {name: value for name, value in os.environ.items() if name != _PRELOADED}
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})"
    command = [sys.executable, "-c", f"{threads}; {code}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().split("\n")[-1])


def _device(system: str) -> str:
    if system == "AsyncTransformer":
        return DEVICE[0]
    import mlx.core as mx

    return "Metal" if mx.default_device().type == mx.DeviceType.gpu else platform.machine()


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """Return a column for each system."""
    heads = [_head(name) for name in found]
    lines = [f"| {NUM_PARTICLES} particles | {' | '.join(heads)} |", "|---|" + "---|" * len(found)]
    rates = [f"{statistics.median(n['tokens_per_second']):.0f}" for n in found.values()]
    lines.append(f"| SIS behind {PROMPT_TOKENS} tokens, tokens per second | {' | '.join(rates)} |")
    for size in SHARED:
        times = [f"{1e3 * statistics.median(n[f'{size} s']):.0f} ms" for n in found.values()]
        lines.append(f"| a step behind {size:,} shared tokens | {' | '.join(times)} |")
    return "\n".join(lines)


def _head(system: str) -> str:
    name, comma, how = system.partition(",")
    return f"`{name}`{comma}{how}"
