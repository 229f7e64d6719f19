"""SIS behind a prompt that is cached already, against vLLM's own ``LLM.generate``."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from typing import Any

import numpy as np

from benchmarks.limit import Pass, program_seconds
from benchmarks.virtual import ENGINE_OPTIONS, NUM_PARTICLES, NUM_TOKENS, rates_of
from benchmarks.workload import SHARE, Row

SIZES = (51, 512, 4096)
"""Tokens of the prompt."""
_AIMS = {51: "1.5×", 512: "3.3×", 4096: "3.2×"}


def prompt_of(size: int) -> list[int]:
    """Return a prompt of so many tokens, the same for both."""
    generator = random.Random(size)
    return [generator.randrange(1000, 40_000) for _ in range(size)]


def ours() -> dict[str, Any]:
    """Tokens per second of particles that draw from rows, and the seconds of their limit."""
    from benchmarks.workloads import load_ours

    lm = load_ours(batch_size=NUM_PARTICLES, row_cache_bytes=0)
    numbers: dict[str, Any] = {}
    for size in SIZES:
        prompt = prompt_of(size)
        lm.cache_kv(prompt)

        async def particle(stream: np.random.Generator, prompt: list[int] = prompt) -> None:
            context = list(prompt)
            for _ in range(NUM_TOKENS):
                row = await lm.next_token_logprobs(context)
                context.append(lm.draw(row, generator=stream))

        async def particles(seed: int, particle: Any = particle) -> None:
            streams = [np.random.default_rng(1000 * seed + i) for i in range(NUM_PARTICLES)]
            await asyncio.gather(*map(particle, streams))

        found = rates_of({"": lambda seed, run=particles: asyncio.run(run(seed))}, 1)[""]
        steps = [
            Pass(NUM_PARTICLES, NUM_PARTICLES, size + i * NUM_PARTICLES) for i in range(NUM_TOKENS)
        ]
        numbers[f"{size} rate"] = found
        numbers[f"{size} limit s"] = [program_seconds(lm.model, steps)]
    lm.close()
    return numbers


def theirs() -> dict[str, Any]:
    """Tokens per second of ``LLM.generate`` on an engine that knows nothing of this library."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    from genlm_backend.backends.bundled import bundled_directory
    from genlm_backend.backends.vllm.release import let_modules_be_scanned

    options = {**ENGINE_OPTIONS, "max_model_len": SIZES[-1] + 2 * NUM_TOKENS}
    let_modules_be_scanned()
    llm = LLM(str(bundled_directory("smollm2")), disable_log_stats=True, **options)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)

    def rate(size: int) -> list[float]:
        prompts = [{"prompt_token_ids": prompt_of(size)}] * NUM_PARTICLES
        return rates_of({"": lambda _: llm.generate(prompts, params, use_tqdm=False)}, 1)[""]

    return {f"{size} rate": rate(size) for size in SIZES}


def rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    """Return tokens per second behind each prompt, and over the other's."""
    table: list[Row] = []
    numbers = found["genlm_backend"]
    for size in SIZES:
        rate = statistics.median(numbers[f"{size} rate"])
        table.append((f"SIS behind {size:,} cached tokens, tokens per second", f"{rate:.0f}", ""))
        if "LLM.generate" in found:
            other = statistics.median(found["LLM.generate"][f"{size} rate"])
            label = f"… over vLLM's `LLM.generate` ({other:.0f})"
            table.append((label, f"{rate / other:.1f}×", _AIMS[size]))
        limit = statistics.median(numbers[f"{size} limit s"])
        share = limit * rate / (NUM_PARTICLES * NUM_TOKENS)
        table.append((SHARE, f"{share:.0%}", "72%" if size == SIZES[0] else ""))
    return table
