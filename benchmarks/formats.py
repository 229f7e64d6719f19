"""What number formats of keys and values cost in answers and time, and what files of them save."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from benchmarks.systems import load_hf
from benchmarks.workload import Numbers, Row, median

FORMATS = (None, "bfloat16", "float16", "int8", "uint4")
NUM_SCORED = 4096
"""Tokens of one context whose perplexity is measured."""
NUM_PROMPTS, PROMPT_TOKENS, NUM_GREEDY = 200, 24, 16
STEPS_BEHIND = (512, 4096)
NUM_PARTICLES = 20
FILE_TOKENS = 4000


def text_ids(tokenizer: Any) -> list[int]:
    """Return the reference manual that every Python brings along, as tokens."""
    return tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))


def load(**options: Any) -> Any:
    from genlm_backend import AsyncTransformer

    model, tokenizer = load_hf()
    return AsyncTransformer(
        model, tokenizer, batch_size=50, row_cache_bytes=0, kv_cache_bytes=1 << 30, **options
    )


def greedy(lm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return the most probable continuation of each prompt, token by token."""
    texts: list[list[int]] = []
    for start in range(0, len(prompts), 50):
        contexts = [list(prompt) for prompt in prompts[start : start + 50]]
        for _ in range(NUM_GREEDY):
            rows = lm.batch_next_token_logprobs_sync(contexts)
            for context, token in zip(contexts, rows.argmax(-1).tolist(), strict=True):
                context.append(token)
        texts += [context[-NUM_GREEDY:] for context in contexts]
        lm.clear_cache()
    return texts


def step_seconds(lms: dict[str, Any], num_shared: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a step of particles behind a prompt, format by format in turns."""
    generator = random.Random(0)
    prompt = [generator.randrange(1000, 40_000) for _ in range(num_shared)]
    contexts = {name: [[*prompt, 1000 + i] for i in range(NUM_PARTICLES)] for name in lms}
    found: dict[str, list[float]] = {name: [] for name in lms}
    for lm in lms.values():
        lm.cache_kv(prompt)
    for _ in range(6 * repeats + 2):
        for name, lm in lms.items():
            start = time.perf_counter()
            lm.batch_next_token_logprobs_sync(contexts[name])
            found[name].append(time.perf_counter() - start)
            for context in contexts[name]:
                context.append(generator.randrange(1000, 40_000))
    for lm in lms.values():
        lm.clear_cache()
    return {name: seconds[2:] for name, seconds in found.items()}


def measure(repeats: int) -> Numbers:
    """Perplexity, agreement of greedy texts, capacity and seconds of a step, by format."""
    lms = {str(kept): load(kv_cache_dtype=kept) for kept in FORMATS}
    ids = text_ids(lms["None"].tokenizer)
    generator = random.Random(0)
    starts = [generator.randrange(NUM_SCORED, len(ids) - 100) for _ in range(NUM_PROMPTS)]
    prompts = [ids[start : start + PROMPT_TOKENS] for start in starts]
    numbers: Numbers = {}
    exact: list[list[int]] = []
    for name, lm in lms.items():
        scores = lm.score_sync(ids[:1], ids[1 : NUM_SCORED + 1])
        lm.clear_cache()
        texts = greedy(lm, prompts)
        exact = exact or texts
        pairs = list(zip(texts, exact, strict=True))
        numbers[f"{name} perplexity"] = math.exp(-float(scores.double().mean()))
        numbers[f"{name} first"] = statistics.mean(a[0] == b[0] for a, b in pairs)
        numbers[f"{name} text"] = statistics.mean(a == b for a, b in pairs)
        numbers[f"{name} slots"] = lm.kv_capacity
    for num_shared in STEPS_BEHIND:
        for name, seconds in step_seconds(lms, num_shared, repeats).items():
            numbers[f"{name} {num_shared} s"] = seconds
    for lm in lms.values():
        lm.close()
    return numbers


def markdown(numbers: Numbers) -> str:
    """Return a table with a line for each format."""
    short, long = STEPS_BEHIND
    lines = [
        f"| `kv_cache_dtype` | tokens in the same bytes | perplexity of {NUM_SCORED:,} tokens | "
        f"{NUM_PROMPTS} prompts: same next token | … same {NUM_GREEDY} tokens | "
        f"step behind {short} | … behind {long:,} |",
        "|---|---|---|---|---|---|---|",
    ]
    base = {key[5:]: value for key, value in numbers.items() if key.startswith("None ")}
    for kept in FORMATS:
        own = {
            key.removeprefix(f"{kept} "): value
            for key, value in numbers.items()
            if key.startswith(f"{kept} ")
        }
        change = own["perplexity"] / base["perplexity"] - 1
        steps = [median(own[f"{n} s"]) / median(base[f"{n} s"]) for n in STEPS_BEHIND]
        if kept is None:
            cells = [
                "`None` (float32)",
                "1",
                f"{own['perplexity']:.3f}",
                "",
                "",
                *(f"{median(own[f'{n} s']) * 1000:.0f} ms" for n in STEPS_BEHIND),
            ]
        else:
            cells = [
                f'`"{kept}"`',
                f"{own['slots'] / base['slots']:.2f}×",
                f"{own['perplexity']:.3f} ({change:+.2%})",
                f"{own['first']:.1%}",
                f"{own['text']:.1%}",
                *(f"{ratio:.2f}×" for ratio in steps),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# -------------------------------------------------------------------- what comes back


def measure_files(repeats: int) -> Numbers:
    """Seconds to compute a prompt, to save and load it, and to fetch it from the host."""
    import warnings

    numbers: Numbers = {"compute s": [], "save s": [], "load s": [], "fetch s": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lm = load()
        per_token = lm._evaluator.scheduler.cache.pool.bytes_per_slot
        tiered = load(host_cache_bytes=1 << 30)
    ids = text_ids(lm.tokenizer)[:FILE_TOKENS]
    path = Path(tempfile.mkdtemp()) / "prompt.safetensors"
    for _ in range(max(2, repeats // 2)):
        lm.clear_cache()
        numbers["compute s"].append(_seconds(lambda: lm.next_token_logprobs_sync(ids)))
        numbers["save s"].append(_seconds(lambda: lm.save_prefix(ids, path)))
        lm.clear_cache()
        numbers["load s"].append(_seconds(lambda: lm.load_prefix(path)))
    numbers["first load s"] = [_seconds(lambda: tiered.load_prefix(path))]  # weights are read too
    tree = tiered._evaluator.scheduler.tree
    for _ in range(max(2, repeats // 2)):
        tree.evict(FILE_TOKENS)
        numbers["fetch s"].append(_seconds(lambda: tiered.next_token_logprobs_sync([*ids, 1])))
    numbers["MB"] = per_token * FILE_TOKENS / 1e6
    path.unlink()
    lm.close()
    tiered.close()
    return numbers


def file_rows(numbers: Numbers) -> list[Row]:
    """Return what to show of it."""
    compute = median(numbers["compute s"])
    what = f"a prompt of {FILE_TOKENS:,} tokens ({numbers['MB']:.0f} MB)"
    return [
        (f"{what}: computed, seconds", f"{compute:.1f}", ""),
        ("… saved into a file", f"{median(numbers['save s']):.2f}", ""),
        (
            "… loaded, over computed; by a model that has just been made",
            f"{numbers['first load s'][0] / compute:.3f}×",
            "0.1×",
        ),
        ("… loaded again", f"{median(numbers['load s']) / compute:.3f}×", ""),
        (
            "… fetched from the host with the next row, over computed; both memories are one here",
            f"{median(numbers['fetch s']) / compute:.3f}×",
            "",
        ),
    ]


def _seconds(function: Any) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        function()
    return time.perf_counter() - start
