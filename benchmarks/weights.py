"""What weights in 8 and 4 bits cost in answers, and what they save in time, on a CPU."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.formats import NUM_PARTICLES, text_ids
from benchmarks.systems import PROMPT_TOKENS, TEXT, RowSystem, load_hf
from benchmarks.workload import Found, Numbers, median
from genlm_backend.backends.hf.int8_weights import Int8Linear, quantize

NUM_ROWS = (1, 20, 100)
NUM_SCORED = 2048
NUM_TOKENS = 16


def _int8() -> Any:
    model, _ = load_hf()
    quantize(model)
    return model


def _bitsandbytes(**options: Any) -> Callable[[], Any]:
    def load() -> Any:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        from genlm_backend.backends.bundled import bundled_directory

        return AutoModelForCausalLM.from_pretrained(
            bundled_directory("smollm2"),
            dtype=torch.float32,
            quantization_config=BitsAndBytesConfig(**options),
        )

    return load


MODELS: dict[str, Callable[[], Any]] = {
    "float32": lambda: load_hf()[0],
    "float32, rounded to bfloat16 before": lambda: load_hf()[0].bfloat16().float(),
    "bitsandbytes, 8 bits, threshold 0": _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes, NF4": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    '`weights="int8"`': _int8,
}


def _linear_layers(model: Any) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) or type(module) is Int8Linear
    ]


@torch.inference_mode()
def product_seconds(model: Any, num_rows: int, repeats: int) -> list[float]:
    """Seconds of all products of a pass."""
    layers: list[Any] = _linear_layers(model)
    generator = torch.Generator().manual_seed(0)
    widths = {layer.in_features for layer in layers}
    rows = {n: torch.randn(num_rows, n, generator=generator) for n in widths}
    found: list[float] = []
    for _ in range(4 * repeats + 2):
        start = time.perf_counter()
        for layer in layers:
            layer(rows[layer.in_features])
        found.append(time.perf_counter() - start)
    return found[2:]


class Loaded(RowSystem):
    """Particles of a model that has been loaded."""

    def __init__(self, lm: Any) -> None:
        self.lm = lm

    def start(self, num_particles: int) -> list[int]:
        return self.lm.tokenizer.encode(TEXT)[:PROMPT_TOKENS]


def measure(name: str, repeats: int) -> Numbers:
    """Seconds of products, speed of sampling, and perplexity, of one format of the weights."""
    from genlm_backend import AsyncTransformer

    found: list[Any] = []
    numbers: Numbers = {}

    def products() -> None:
        found.append(MODELS[name]())
        for num_rows in NUM_ROWS:
            numbers[f"{num_rows} s"] = product_seconds(found[0], num_rows, repeats)

    thread = threading.Thread(target=products)  # whose team of threads ends with it
    thread.start()
    thread.join()
    tokenizer = load_hf()[1]
    with AsyncTransformer(found[0], tokenizer, row_cache_bytes=0, packs_weights=True) as lm:
        ids = text_ids(tokenizer)[: NUM_SCORED + 1]
        scores = lm.score_sync(ids[:1], ids[1:])
        numbers["perplexity"] = math.exp(-float(scores.double().mean()))
        numbers["unlike"] = _unlike(lm)
        system = Loaded(lm)
        prompt = system.start(NUM_PARTICLES)
        speeds: list[float] = []
        for seed in range(2 * repeats + 1):
            start = time.perf_counter()
            count = system.sample(prompt, NUM_PARTICLES, NUM_TOKENS, seed)
            speeds.append(count / (time.perf_counter() - start))
        numbers["tokens/s"] = speeds[1:]
    return numbers


def _unlike(lm: Any) -> float:
    """Return how far rows computed one by one are from those of a batch."""
    generator = random.Random(0)
    contexts = [[generator.randrange(1000, 40_000) for _ in range(12)] for _ in range(20)]
    together = lm.batch_next_token_logprobs_sync(contexts)
    lm.clear_cache()
    alone = torch.stack([lm.next_token_logprobs_sync(context) for context in contexts])
    lm.clear_cache()
    return float((together - alone).abs().max())


def markdown(found: Found) -> str:
    """Return a table with a line for each format."""
    lines = [
        f"| weights | products of {', '.join(map(str, NUM_ROWS))} rows | {NUM_PARTICLES} particles "
        f"behind {PROMPT_TOKENS} tokens | perplexity of {NUM_SCORED:,} tokens | "
        "a row alone and in a batch differ by |",
        "|---|---|---|---|---|",
    ]
    base = found["float32"]["perplexity"]
    base_speed = median(found["float32"]["tokens/s"])
    for name, own in found.items():
        products = " / ".join(f"{median(own[f'{n} s']) * 1000:.0f}" for n in NUM_ROWS)
        speed, perplexity = median(own["tokens/s"]), own["perplexity"]
        cells = [
            name,
            f"{products} ms",
            f"{speed:.0f} tokens per s ({speed / base_speed:.2f}×)",
            f"{perplexity:.3f} ({perplexity / base - 1:+.2%})",
            f"{own['unlike']:.0e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
