"""mean_keys: what the keys of a model have in common, whatever its context."""

from __future__ import annotations

import random
from typing import Final

import torch
from transformers.cache_utils import DynamicLayer

from genlm_backend.cache import StateLayout
from genlm_backend.llm.hf.runner import Runner
from genlm_backend.llm.hf.support import fresh_cache

_NUM_TOKENS: Final = 256
_FARTHEST: Final = 4096


@torch.inference_mode()
def mean_keys(
    runner: Runner, vocab_size: int, longest: float, states: StateLayout
) -> list[torch.Tensor]:
    """Return the mean of the keys of each layer that attends, over tokens drawn at random.

    The tokens are always the same ones. Some channels of keys lie far from zero in every context,
    the more so where rotary positions turn them slowly. The tokens are spread over positions, as
    those of a long context are.

    Args:
        runner: What calls the model.
        vocab_size: Number of token ids.
        longest: Longest context that the model takes.
        states: Its running states, and what its layers hold.

    Returns:
        For each layer, all heads in a row: float32 ``[num_key_heads * key_dim]``.
    """
    generator = random.Random(0)
    farthest = int(min(longest, _FARTHEST))
    num_tokens = min(_NUM_TOKENS, farthest)
    ids = [generator.randrange(vocab_size) for _ in range(num_tokens)]
    positions = torch.arange(num_tokens, dtype=torch.int64) * (farthest // num_tokens)
    inputs = {
        "input_ids": torch.tensor([ids], dtype=torch.int64),
        "position_ids": positions.unsqueeze(0),
    }
    if "position_ids" not in runner.parameters:
        del inputs["position_ids"]
    cache = fresh_cache(states.layers)
    on_device = {name: tensor.to(runner.device) for name, tensor in inputs.items()}
    runner.twin.module(**on_device, past_key_values=cache, use_cache=True)
    attending = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    keys = [getattr(layer, "keys")[0].float() for layer in attending]  # noqa: B009  # initialised
    # A token that overflows spoils those behind it, and has no part in a mean.
    return [
        torch.where(of_layer.isfinite(), of_layer, torch.nan).nanmean(1).nan_to_num(0).reshape(-1)
        for of_layer in keys
    ]
