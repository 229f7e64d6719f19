"""What weights in 8 and 4 bits cost in answers and time on a CPU.

Two ways of products in whole numbers are tried here that the library does not offer. A row of
activations has a scale of its own in both, so that it does not depend on the other rows. One rounds
it to a digit of 8 bits; the other adds a second digit for what that leaves, and both go through one
product of twice as many rows.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from benchmarks.formats import NUM_PARTICLES, step_seconds, text_ids
from benchmarks.systems import PROMPT_TOKENS, load_hf
from benchmarks.workload import Numbers, median

NUM_ROWS = (1, 20, 100)
NUM_SCORED = 2048
_LARGEST = 127
_ZERO = 128  # of unsigned digits


@numba.njit(nogil=True, fastmath=True, error_model="numpy")
def _digits(rows: Any, num_digits: int, codes: Any, scales: Any) -> None:
    """Write each row's digits, the high ones first, and the scale of its lowest digit."""
    num_rows, width = rows.shape
    steps = np.float32(127 if num_digits == 1 else 127 * 128)
    for row in range(num_rows):
        largest = np.float32(0)
        for column in range(width):
            largest = max(largest, abs(rows[row, column]))
        scale = largest / steps
        scales[row] = scale
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        if num_digits == 1:
            for column in range(width):
                codes[row, column] = np.uint8(rows[row, column] * inverse + np.float32(128.5))
        else:
            for column in range(width):  # added so that all are positive, and truncated is rounded
                code = np.int32(rows[row, column] * inverse + np.float32(128 * 128 + 64 + 0.5))
                codes[row, column] = np.uint8(code >> 7)
                codes[num_rows + row, column] = np.uint8((code & 127) + 64)


@numba.njit(nogil=True, fastmath=True, error_model="numpy")
def _add_up(products: Any, scales: Any, num_digits: int) -> None:
    """Multiply by the scales of the rows, and add the products of low digits to those of high."""
    num_rows = len(scales)
    for row in range(num_rows):
        scale = scales[row]
        for column in range(products.shape[1]):
            if num_digits == 1:
                products[row, column] *= scale
            else:
                products[row, column] = (
                    products[row, column] * (scale * np.float32(128))
                    + products[num_rows + row, column] * scale
                )


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 with a scale for each output."""

    def __init__(self, layer: nn.Linear, num_digits: int) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.scale = weight.abs().amax(1) / _LARGEST
        codes = (weight / self.scale[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self.zero = torch.zeros(len(codes), dtype=torch.int32)
        self.bias, self.num_digits = layer.bias, num_digits
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        num_rows = len(rows)
        codes = torch.empty((self.num_digits * num_rows, self.in_features), dtype=torch.uint8)
        scales = np.empty(num_rows, np.float32)
        _digits(rows.numpy(), self.num_digits, codes.numpy(), scales)
        products = torch.ops.onednn.qlinear_pointwise(
            *(codes, 1.0, _ZERO, self.packed, self.scale, self.zero, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        _add_up(products.numpy(), scales, self.num_digits)
        found = products[:num_rows].view(*input.shape[:-1], self.out_features)
        return found if self.bias is None else found + self.bias


def _in_digits(model: nn.Module, num_digits: int) -> nn.Module:
    for name, child in model.named_children():
        if type(child) is nn.Linear:
            setattr(model, name, Int8Linear(child, num_digits))
        else:
            _in_digits(child, num_digits)
    return model


def _bitsandbytes(**options: Any) -> Callable[[], Any]:
    def load() -> Any:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        from genlm_backend.llm.bundled import bundled_directory

        return AutoModelForCausalLM.from_pretrained(
            bundled_directory("smollm2"),
            dtype=torch.float32,
            quantization_config=BitsAndBytesConfig(**options),
        )

    return load


MODELS: dict[str, Callable[[], Any]] = {
    "float32": lambda: load_hf()[0],
    "bitsandbytes, 8 bits, threshold 0": _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes, NF4": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "int8, activations of one digit (not offered)": lambda: _in_digits(load_hf()[0], 1),
    "int8, activations of two digits (not offered)": lambda: _in_digits(load_hf()[0], 2),
}


def _linear_layers(model: Any) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) or type(module) is Int8Linear
    ]


@torch.inference_mode()
def product_seconds(models: dict[str, Any], num_rows: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of all products of a pass, model by model in turns."""
    found: dict[str, list[float]] = {name: [] for name in models}
    generator = torch.Generator().manual_seed(0)
    for _ in range(2 * repeats + 1):
        for name, model in models.items():
            layers: list[Any] = _linear_layers(model)
            widths = {layer.in_features for layer in layers}
            rows = {n: torch.randn(num_rows, n, generator=generator) for n in widths}
            start = time.perf_counter()
            for layer in layers:
                layer(rows[layer.in_features])
            found[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in found.items()}


def measure(repeats: int) -> Numbers:
    """Seconds of products and steps, and perplexity, by the format of the weights."""
    from genlm_backend import AsyncTransformer

    tokenizer = load_hf()[1]
    models = {name: load() for name, load in MODELS.items()}
    numbers: Numbers = {}

    def products() -> None:
        for num_rows in NUM_ROWS:
            for name, seconds in product_seconds(models, num_rows, repeats).items():
                numbers[f"{name} {num_rows} s"] = seconds

    thread = threading.Thread(target=products)  # whose team of threads ends with it
    thread.start()
    thread.join()
    lms = {
        name: AsyncTransformer(model, tokenizer, row_cache_bytes=0, packs_weights=True)
        for name, model in models.items()
    }
    ids = text_ids(tokenizer)[: NUM_SCORED + 1]
    for name, lm in lms.items():
        scores = lm.score_sync(ids[:1], ids[1:])
        numbers[f"{name} perplexity"] = math.exp(-float(scores.double().mean()))
        numbers[f"{name} unlike"] = _unlike(lm)
    for name, seconds in step_seconds(lms, PROMPT_TOKENS, repeats).items():
        numbers[f"{name} step s"] = seconds
    for lm in lms.values():
        lm.close()
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


def markdown(numbers: Numbers) -> str:
    """Return a table with a line for each format."""
    lines = [
        f"| weights | products of {', '.join(map(str, NUM_ROWS))} rows | step of {NUM_PARTICLES} "
        f"behind {PROMPT_TOKENS} tokens | perplexity of {NUM_SCORED:,} tokens | "
        "a row alone and in a batch differ by |",
        "|---|---|---|---|---|",
    ]
    base = numbers["float32 perplexity"]
    base_step = median(numbers["float32 step s"])
    for name in MODELS:
        products = " / ".join(f"{median(numbers[f'{name} {n} s']) * 1000:.0f}" for n in NUM_ROWS)
        step, perplexity = median(numbers[f"{name} step s"]), numbers[f"{name} perplexity"]
        cells = [
            name,
            f"{products} ms",
            f"{step * 1000:.0f} ms ({base_step / step:.2f}× as fast)",
            f"{perplexity:.3f} ({perplexity / base - 1:+.2%})",
            f"{numbers[f'{name} unlike']:.0e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
