"""Programs on genlm-control and llamppl, on this library and on the peer."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from genlm_backend.backends.bundled import bundled_directory

EXAMPLES = Path(__file__).parent.parent / "examples"
NUM_PARTICLES, NUM_TOKENS = 20, 20


def client(example: str, repeats: int) -> dict[str, Any]:
    """Seconds that a program takes, and how many of them it is in the model's forward pass.

    What is imported as ``genlm.backend`` decides what it runs on.
    """
    program = _load(example)
    forward_s = _timed_forward()
    model = program.load(str(bundled_directory("smollm2")), NUM_PARTICLES)
    numbers: dict[str, list[float]] = {"seconds": [], "forward_s": [], "num_forwards": []}
    for seed in range(-1, repeats):
        torch.manual_seed(seed + 1)
        np.random.seed(seed + 1)
        model.model.clear_cache()
        forward_s.clear()
        start = time.perf_counter()
        asyncio.run(program.sample(model, NUM_PARTICLES, 2 if seed < 0 else NUM_TOKENS))
        if seed >= 0:
            numbers["seconds"].append(time.perf_counter() - start)
            numbers["forward_s"].append(sum(forward_s))
            numbers["num_forwards"].append(len(forward_s))
    return numbers


def _load(example: str) -> Any:
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _timed_forward() -> list[float]:
    """Let the model's class write the seconds of every forward pass into the list returned."""
    from transformers import LlamaForCausalLM

    seconds: list[float] = []
    original: Callable[..., Any] = LlamaForCausalLM.forward

    @functools.wraps(original)
    def forward(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - start)

    LlamaForCausalLM.forward = forward
    return seconds
