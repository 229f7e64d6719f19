"""What cannot be beaten: the matrix products of a model alone, on this machine."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch


@torch.inference_mode()
def products_seconds(model: Any, num_tokens: int, num_outputs: int, repeats: int = 3) -> float:
    """Median seconds of a forward pass's products with its weights, and of nothing else.

    Attention between tokens, norms and activations are left out.

    Args:
        model: Of transformers.
        num_tokens: Tokens that go through the layers.
        num_outputs: Tokens whose logits are computed.
        repeats: Times to measure.
    """
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    sizes = {layer.in_features for layer in layers} | {head.in_features}
    device, dtype = head.weight.device, head.weight.dtype
    inputs = {n: torch.randn(num_tokens, n, device=device, dtype=dtype) for n in sizes}
    outputs = torch.randn(num_outputs, head.in_features, device=device, dtype=dtype)

    def once() -> float:
        start = time.perf_counter()
        for layer in layers:
            torch.mm(inputs[layer.in_features], layer.weight.T)
        torch.mm(outputs, head.weight.T)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(repeats))


def program_seconds(model: Any, passes: list[tuple[int, int]]) -> float:
    """Seconds of the products of several forward passes, given as tokens and outputs of each."""
    known = {sizes: products_seconds(model, *sizes) for sizes in set(passes)}
    return sum(known[sizes] for sizes in passes)


def passes_between(before: Any, after: Any, most: int) -> list[tuple[int, int]]:
    """Return as many forward passes as two statistics have between them, alike on average.

    Args:
        before: ``lm.statistics()``.
        after: The same, later.
        most: Contexts in a pass, at most.
    """
    num_passes = after.num_forwards - before.num_forwards
    size = round((after.tokens_computed - before.tokens_computed) / num_passes)
    return [(size, min(size, most))] * num_passes


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the power of size that the times grow with: the slope of a line through the logs."""
    import numpy as np

    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
