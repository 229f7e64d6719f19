"""What stands above the models: draws, masks, tasks from threads, requests of an engine."""

from __future__ import annotations

import asyncio
import time

import torch

from benchmarks.limit import program_seconds
from benchmarks.systems import TEXT, load_hf, tensor_on
from benchmarks.workloads import Numbers, load_ours, prompt_of, seconds


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
            num_passes = after.num_forwards - before.num_forwards
            size = round((after.tokens_computed - before.tokens_computed) / num_passes)
            passes = [(size, min(size, max_batch))] * num_passes
            numbers["limit_s"].append(program_seconds(lm.model, passes))
            numbers["theirs_s"].append(seconds(theirs))
    lm.close()
    return {**numbers, "num_requests": num_requests, "num_tokens": sum(lengths)}
