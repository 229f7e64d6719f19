"""AsyncLlamaCppLM beside llama.cpp itself, and beside AsyncTransformer; prints Markdown tables.

It runs where llama-cpp-python is installed: ``python -m benchmarks.llama_cpp``. With ``--model`` it
measures another GGUF file, without AsyncTransformer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

import numpy as np

from genlm_backend import load_model_by_name
from genlm_backend.backends.llama_cpp.binding import library, log_caught
from genlm_backend.backends.llama_cpp.gguf_model import resolve_file

NUM_PARTICLES, NUM_TOKENS, SIZES = 20, 16, (51, 512, 4096)
NUM_CELLS = 16384


def tokens(size: int, seed: int = 0) -> list[int]:
    """Random token ids that are no special ones."""
    generator = random.Random(seed)
    return [generator.randrange(100, 40000) for _ in range(size)]


# ---------------------------------------------------------------- one particle after another


def sis_one_by_one(file: str, size: int) -> float:
    """Tokens per second of particles that are evaluated one after another, from a saved state."""
    from llama_cpp import Llama  # pyright: ignore

    model = Llama(file, n_ctx=size + 64, n_batch=512, verbose=False)
    model.eval(tokens(size))
    prompt, draws = model.save_state(), np.random.default_rng(0)
    start = time.perf_counter()
    for _ in range(NUM_PARTICLES):
        model.load_state(prompt)
        for _ in range(NUM_TOKENS):
            logits = np.ctypeslib.as_array(model._ctx.get_logits(), (model.n_vocab(),))
            row = np.exp(logits - logits.max(), dtype=np.float64)
            model.eval([int(draws.choice(len(row), p=row / row.sum()))])
    return NUM_PARTICLES * NUM_TOKENS / (time.perf_counter() - start)


def sis_awaited(lm: Any, size: int, seed: int) -> float:
    """Tokens per second of particles that each await their rows behind a cached prompt."""
    prompt = tokens(size)
    lm.next_token_logprobs_sync(prompt)

    async def walk(i: int) -> None:
        context, draws = prompt, np.random.default_rng([seed, i])
        for _ in range(NUM_TOKENS):
            context = [*context, lm.draw(await lm.next_token_logprobs(context), generator=draws)]

    async def all_walk() -> None:
        await asyncio.gather(*map(walk, range(NUM_PARTICLES)))

    start = time.perf_counter()
    asyncio.run(all_walk())
    return NUM_PARTICLES * NUM_TOKENS / (time.perf_counter() - start)


# ---------------------------------------------------------------- steps


class Bare:
    """Steps of llama.cpp alone: one batch of a token for each of some sequences."""

    def __init__(self, file: str, size: int, num_threads: int) -> None:
        lib = self.lib = library()
        with log_caught():
            params = lib.llama_model_default_params()
            self.model = lib.llama_model_load_from_file(file.encode(), params)
            self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
            params = lib.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
                NUM_CELLS,
                2048,
                512,
                NUM_PARTICLES + 1,
            )
            params.n_threads = params.n_threads_batch = num_threads
            params.kv_unified, params.flash_attn_type = True, lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            self.context = lib.llama_init_from_model(self.model, params)
        self.memory, self.position = lib.llama_get_memory(self.context), size
        for start in range(0, size, 512):
            part = tokens(size)[start : start + 512]
            self.decode([(token, start + i, 0, False) for i, token in enumerate(part)])
        for sequence in range(1, NUM_PARTICLES + 1):
            lib.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)

    def decode(self, items: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens at positions of sequences, with or without logits behind them."""
        batch = self.lib.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        for i, (token, position, sequence, has_output) in enumerate(items):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, has_output
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert self.lib.llama_decode(self.context, batch) == 0
        num_outputs = sum(item[3] for item in items)
        if num_outputs:
            found = self.lib.llama_get_logits(self.context)
            np.ctypeslib.as_array(found, (num_outputs, self.vocab_size)).copy()
        self.lib.llama_batch_free(batch)

    def step(self) -> None:
        """Compute a token of each sequence."""
        ids = tokens(NUM_PARTICLES, self.position)
        self.decode([(ids[i], self.position, i + 1, True) for i in range(NUM_PARTICLES)])
        self.position += 1

    def close(self) -> None:
        """Free everything."""
        with log_caught():
            self.lib.llama_free(self.context)
            self.lib.llama_model_free(self.model)


class Awaited:
    """Steps of particles that await their rows at once, behind a prompt that is cached."""

    def __init__(self, lm: Any, size: int) -> None:
        self.lm, prompt = lm, tokens(size)
        lm.next_token_logprobs_sync(prompt)
        self.contexts = [prompt] * NUM_PARTICLES

    def step(self) -> None:
        """Await the rows behind a token more of each particle."""
        new = tokens(NUM_PARTICLES, len(self.contexts[0]))
        self.contexts = [[*one, token] for one, token in zip(self.contexts, new, strict=True)]

        async def rows() -> None:
            await asyncio.gather(*map(self.lm.next_token_logprobs, self.contexts))

        asyncio.run(rows())


def main() -> None:
    """Measure, and print what has been found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    file, options = resolve_file(given.model), {"row_cache_bytes": 0, "num_threads": given.threads}
    lms: dict[str, Any] = {"AsyncLlamaCppLM": load_model_by_name(file, "llama-cpp", options)}
    if given.model == "smollm2":
        for name, more in (("float32", {}), ("int8", {"weights": "int8"})):
            lm = load_model_by_name("smollm2", "hf", {**options, **more})
            lms[f"AsyncTransformer, {name}"] = lm
    steps: dict[str, list[float]] = {name: [] for name in ("llama_decode alone", *lms)}
    for size in SIZES:
        ways: dict[str, Any] = {"llama_decode alone": Bare(file, size, given.threads)}
        ways |= {name: Awaited(lm, size) for name, lm in lms.items()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(given.repeats):  # in turns
            for name, way in ways.items():
                start = time.perf_counter()
                way.step()
                times[name].append(1000 * (time.perf_counter() - start))
        for name, own in times.items():
            steps[name].append(statistics.median(own))
        ways["llama_decode alone"].close()
    loop = [sis_one_by_one(file, size) for size in SIZES]
    rates: dict[str, list[float]] = {"Llama.eval, particle by particle": loop}
    for name, lm in lms.items():
        lm.clear_cache()
        rates[name] = [
            statistics.median(sis_awaited(lm, size, seed) for seed in range(3)) for size in SIZES
        ]
        lm.close()
    print(f"Milliseconds of a step of {NUM_PARTICLES} particles, by tokens before them.\n")
    table(steps)
    print(f"\nTokens per second of SIS, {NUM_PARTICLES} particles of {NUM_TOKENS} tokens.\n")
    table(rates)


def table(rows: dict[str, list[float]]) -> None:
    """Print rows of numbers, by the size of the prompt."""
    print("| |", " | ".join(map(str, SIZES)), "|")
    print("|---|" + "---|" * len(SIZES))
    for name, numbers in rows.items():
        print(f"| {name} |", " | ".join(f"{number:.0f}" for number in numbers), "|")


if __name__ == "__main__":
    main()
