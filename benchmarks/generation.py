"""What stands above the models: draws, masks, tasks from threads, requests of an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.limit import passes_between, program_seconds
from benchmarks.systems import TEXT, load_hf, tensor_on
from benchmarks.workloads import Numbers, load_ours, prompt_of, seconds

Interval = tuple[float, float]
"""Beginning and end, seconds."""


def sampling(repeats: int) -> Numbers:
    """The draws of a step of 20 samples, against the step itself and ``torch.multinomial``.

    The latter comes after all the others, because it starts a team of threads.
    """
    lm = load_ours(row_cache_bytes=0)
    generators = [np.random.default_rng(seed) for seed in range(20)]
    prompt = prompt_of(lm)
    numbers: dict[str, list[float]] = {
        name: [] for name in ("step_ms", "draws_ms", "tempered_ms", "multinomial_ms")
    }
    contexts = [[*prompt, i] for i in range(20)]
    asked = [list(lm.batch_next_token_logprobs_sync(contexts))]
    for _ in range(4 * repeats):
        contexts = [[*context, 5] for context in contexts]
        start = time.perf_counter()
        rows = list(lm.batch_next_token_logprobs_sync(contexts))
        numbers["step_ms"].append(1e3 * (time.perf_counter() - start))
        for name, temperature in (("draws_ms", 1.0), ("tempered_ms", 0.8)):
            start = time.perf_counter()
            for row, generator in zip(rows, generators, strict=True):
                lm.draw(row, generator=generator, temperature=temperature)
            numbers[name].append(1e3 * (time.perf_counter() - start))
        asked.append(rows)
    for rows in asked[1:]:
        start = time.perf_counter()
        for row in rows:
            int(torch.multinomial(row.exp(), 1))
        numbers["multinomial_ms"].append(1e3 * (time.perf_counter() - start))
    return {**numbers, "vocabulary": len(lm.byte_vocab)}


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
    numbers: dict[str, list[float]] = {"step_ms": [], "masks_ms": [], "both_ms": [], "hidden": []}
    forwards: list[Interval] = []
    computed: list[Interval] = []
    lm._evaluator.evaluate = noted(lm._evaluator.evaluate, forwards)

    def compute() -> list[torch.Tensor]:
        return [constraint.mask() for constraint in constraints]

    async def both(contexts: list[list[int]]) -> None:
        asked = [lm.next_token_logprobs(context) for context in contexts]
        masks = [asyncio.to_thread(noted(one.mask, computed)) for one in constraints]
        await asyncio.gather(*asked, *masks)

    contexts = [[*prompt, i] for i in range(20)]
    lm.batch_next_token_logprobs_sync(contexts)

    def step() -> None:
        for context in contexts:
            context.append(5)
        lm.batch_next_token_logprobs_sync(contexts)

    def step_with_masks() -> None:
        for context in contexts:
            context.append(5)
        asyncio.run(both(contexts))

    for _ in range(3 * repeats):
        numbers["step_ms"].append(1e3 * seconds(step))
        numbers["masks_ms"].append(1e3 * seconds(compute))
        forwards.clear()
        computed.clear()
        numbers["both_ms"].append(1e3 * seconds(step_with_masks))
        numbers["hidden"].append(share_within(computed, forwards))
    return numbers


def noted(function: Callable[..., Any], intervals: list[Interval]) -> Callable[..., Any]:
    """Return the function, which then adds when each of its calls began and ended."""

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            intervals.append((start, time.perf_counter()))

    return call


def share_within(inner: list[Interval], outer: list[Interval]) -> float:
    """Return which share of the inner intervals' time lies within the outer ones, 0 to 1."""
    shared = sum(max(0.0, min(b, d) - max(a, c)) for a, b in inner for c, d in outer)
    return shared / sum(b - a for a, b in inner)


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
            model.generate(
                ids.to(model.device),
                attention_mask=torch.ones_like(ids, device=model.device),
                pad_token_id=0,
                **options,
            ).cpu()
            for ids in prompts
        ]

    found = zip(ours(), theirs(), strict=True)
    num_equal = sum(torch.equal(first, second) for first, second in found)
    numbers = {"ours_s": [], "theirs_s": [], "limit_s": []}
    for _ in range(repeats):
        before = glm._lm.statistics()
        numbers["ours_s"].append(seconds(ours))
        passes = passes_between(before, glm._lm.statistics(), num_tasks)
        numbers["limit_s"].append(program_seconds(model, passes))
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
                tensor_on(model, rows),
                attention_mask=tensor_on(model, mask),
                do_sample=False,
                max_new_tokens=max(lengths[begin : begin + max_batch]),
                eos_token_id=49_151,
                pad_token_id=0,
            )

    numbers: dict[str, list[float]] = {
        name: [] for name in ("ours_s", "theirs_s", "first_token_s", "limit_s")
    }
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
            before = lm.statistics()
            numbers["ours_s"].append(seconds(ours))
            after = lm.statistics()
            passes = passes_between(before, after, max_batch)
            numbers["limit_s"].append(program_seconds(lm.model, passes))
            numbers["theirs_s"].append(seconds(theirs))
    lm.close()
    return {**numbers, "num_requests": num_requests, "num_tokens": sum(lengths)}
