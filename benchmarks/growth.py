"""How cost grows: with particles, with context, with the vocabulary."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.limit import Pass, exponent, program_seconds
from benchmarks.workloads import load_ours, prompt_of

Numbers = dict[str, Any]


def timed(function: Callable[[], object], repeats: int) -> float:
    """Median seconds, after one call that does not count."""
    function()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def particles(repeats: int, sizes: tuple[int, ...] = (1, 4, 16, 64, 256)) -> Numbers:
    """Seconds of a step, by the number of particles; beside it, its matrix products alone."""
    lm = load_ours(batch_size=max(sizes), row_cache_bytes=0)
    prompt, generator = prompt_of(lm), random.Random(0)
    step_s, limit_s = [], []
    for size in sizes:
        contexts = [[*prompt, 1000 + i] for i in range(size)]
        lm.batch_next_token_logprobs_sync(contexts)

        def step(contexts: list[list[int]] = contexts) -> None:
            for context in contexts:
                context.append(generator.randrange(1000, 40_000))
            lm.batch_next_token_logprobs_sync(contexts)

        step_s.append(timed(step, repeats))
        limit_s.append(program_seconds(lm.model, [Pass(size, size, len(prompt) + size)]))
    lm.close()
    return {"sizes": list(sizes), "step_s": step_s, "limit_s": limit_s}


def context(repeats: int, sizes: tuple[int, ...] = (32, 128, 512, 2048, 4096)) -> Numbers:
    """Seconds of a step of 4 particles, by the length of their cached context."""
    return _behind(4, repeats, sizes)


def shared_context(repeats: int, sizes: tuple[int, ...] = (51, 128, 512, 2048, 4096)) -> Numbers:
    """Seconds of a step of 20 particles, by the length of the context that they share."""
    return _behind(20, repeats, sizes)


def _behind(num_particles: int, repeats: int, sizes: tuple[int, ...]) -> Numbers:
    lm = load_ours(batch_size=num_particles, row_cache_bytes=0, kv_cache_bytes=1 << 30)
    generator = random.Random(0)
    step_s, limit_s = [], []
    for size in sizes:
        prompt = [generator.randrange(1000, 40_000) for _ in range(size)]
        lm.next_token_logprobs_sync(prompt)
        contexts = [[*prompt, 1000 + i] for i in range(num_particles)]
        lm.batch_next_token_logprobs_sync(contexts)

        def step(contexts: list[list[int]] = contexts) -> None:
            for one in contexts:
                one.append(generator.randrange(1000, 40_000))
            lm.batch_next_token_logprobs_sync(contexts)

        step_s.append(timed(step, repeats))
        limit_s.append(program_seconds(lm.model, [Pass(num_particles, num_particles, size)]))
        lm.clear_cache()
    lm.close()
    return {"sizes": list(sizes), "step_s": step_s, "limit_s": limit_s}


def vocabulary(
    repeats: int, sizes: tuple[int, ...] = (32_000, 64_000, 128_000, 256_000)
) -> Numbers:
    """Seconds of building a trie and of the sums of one row, and of a row, by the vocabulary."""
    import numpy as np

    from benchmarks.tries import quarter_million
    from genlm_backend import TokenCharacterTrie

    words = list(dict.fromkeys(map(bytes, quarter_million())))
    generator = random.Random(0)
    seen = set(words)
    while len(words) < max(sizes):
        word = generator.choice(words)[:6] + generator.choice(words)[:4]
        if word not in seen:
            seen.add(word)
            words.append(word)
    generator.shuffle(words)
    # The limit: reading every weight and writing every node.
    build_s, sum_s, limit_s = [], [], []
    for size in sizes:
        part = words[:size]
        build_s.append(timed(lambda part=part: TokenCharacterTrie(part), 1))
        trie = TokenCharacterTrie(part)
        weights = np.random.default_rng(0).random(size)
        sum_s.append(timed(lambda trie=trie, w=weights: trie.weight_sum(w), 20 * repeats))
        nodes = torch.empty(len(trie.weight_sum(weights)), dtype=torch.float64)
        limit_s.append(timed(lambda n=nodes, w=weights: (n.fill_(1.0), w.sum()), 20 * repeats))
    return {"sizes": list(sizes), "build_s": build_s, "sum_s": sum_s, "limit_s": limit_s}


_LABELS = {
    "step_s": "a step",
    "build_s": "building the trie",
    "sum_s": "sums of one row",
}
_LIMITS = {
    "particles": "products, and each key and value read once",
    "context": "products, and each key and value read once",
    "shared_context": "products, and each key and value read once",
    "vocabulary": "touching every weight and node",
}


def markdown(found: dict[str, Numbers]) -> str:
    """Return a table for each kind of growth, with the exponents."""
    lines = []
    for name, numbers in found.items():
        sizes = numbers["sizes"]
        lines += [
            f"| {name.replace('_', ' ')} | "
            f"{' | '.join(f'{size:,}' for size in sizes)} | grows with the power |",
            "|---" * (len(sizes) + 2) + "|",
        ]
        for key, label in [*_LABELS.items(), ("limit_s", _LIMITS[name])]:
            if key in numbers:
                cells = " | ".join(f"{1e3 * value:.3g} ms" for value in numbers[key])
                power = exponent(sizes, numbers[key])
                lines.append(f"| {label} | {cells} | {power:.2f} |")
        lines.append("")
    return "\n".join(lines).rstrip()
