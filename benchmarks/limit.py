"""What cannot be beaten: what a forward pass must at least do, alone on this machine.

That is its products with the weights, and reading each distinct cached key and value once. It is
measured in a process that does nothing else: beside another team of threads the same products take
up to twice as long.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Pass(NamedTuple):
    """The sizes of a forward pass.

    Attributes:
        tokens: Tokens that go through the layers.
        outputs: Tokens whose logits are computed.
        cached: Distinct tokens whose keys and values are read.
    """

    tokens: int
    outputs: int
    cached: int = 0


def program_seconds(model: Any, passes: Sequence[Pass]) -> float:
    """Seconds of several forward passes.

    Attention between tokens, norms and activations are left out.

    Args:
        model: Of transformers; only its shapes are looked at.
        passes: Their sizes.
    """
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    distinct = sorted(set(passes))
    given = {
        "device": str(head.weight.device),
        "dtype": str(head.weight.dtype).removeprefix("torch."),
        "layers": [list(layer.weight.shape) for layer in layers],
        "head": list(head.weight.shape),
        "kept": [2 * config.num_hidden_layers, num_heads * head_dim],
        "passes": distinct,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.limit"],
        input=json.dumps(given),
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        check=True,
    )
    known = dict(zip(distinct, json.loads(done.stdout), strict=True))
    return sum(known[sizes] for sizes in passes)


@torch.inference_mode()
def _measure(given: dict[str, Any]) -> list[float]:
    """Return the median seconds of each pass."""
    device, dtype = torch.device(given["device"]), getattr(torch, given["dtype"])

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    layers, head = [made(*shape) for shape in given["layers"]], made(*given["head"])
    num_buffers, width = given["kept"]

    def seconds(tokens: int, outputs: int, cached: int) -> float:
        inputs = {size: made(tokens, size) for size in {layer.shape[1] for layer in layers}}
        states = made(outputs, head.shape[1])
        kept = [made(cached, width) for _ in range(num_buffers)] if cached else []

        def once() -> float:
            start = time.perf_counter()
            for layer in layers:
                torch.mm(inputs[layer.shape[1]], layer.T)
            torch.mm(states, head.T)
            for buffer in kept:
                buffer.sum()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        once()
        return statistics.median(once() for _ in range(5))

    return [seconds(*sizes) for sizes in given["passes"]]


def passes_between(before: Any, after: Any, most: int) -> list[Pass]:
    """Return as many forward passes as two statistics have between them, alike on average.

    Args:
        before: ``lm.statistics()``.
        after: The same, later.
        most: Contexts in a pass, at most.
    """
    num_passes = after.num_forwards - before.num_forwards
    size = round((after.tokens_computed - before.tokens_computed) / num_passes)
    return [Pass(size, min(size, most))] * num_passes


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the power of size that the times grow with: the slope of a line through the logs."""
    import numpy as np

    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


if __name__ == "__main__":
    json.dump(_measure(json.load(sys.stdin)), sys.stdout)
