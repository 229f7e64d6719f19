"""Abilities of a GGUF model: asked by a few tiny passes, not recognised."""

from __future__ import annotations

import random
from typing import Final, NamedTuple, final

import numpy as np
import torch

from genlm_backend.backends.llama_cpp.gguf_model import GGUFModel
from genlm_backend.backends.llama_cpp.llama_context import ContextSize, LlamaContext
from genlm_backend.backends.llama_cpp.sequences import Copy, Cut

_PROBE_LENGTH: Final = 12
_SHARE_OF_SPREAD: Final = 0.02
_ROUNDING: Final = 1e-3
_BYTES_OF_CELL: Final = 12
"""Bytes of a token in a saved state beside its keys and values: its position and sequence."""


@final
class LlamaSupport(NamedTuple):
    """Abilities of a model.

    Attributes:
        bytes_per_token: Bytes of the keys and values of one token across all layers.
        reason: Why it runs contexts whole; empty where it does not.
    """

    bytes_per_token: int
    reason: str = ""


def examine(model: GGUFModel, num_threads: int, cell_type: int) -> LlamaSupport:
    """Find out what llama.cpp can do with a model, in a small context of its own.

    A context that is forked from the middle of another one is compared with the same one computed
    for itself; what is kept is used where the difference is rounding, compared with the difference
    that one wrong token makes.
    """
    size = ContextSize(8 * _PROBE_LENGTH, 5, 4 * _PROBE_LENGTH, num_threads, cell_type)
    context = LlamaContext(model, size)
    try:
        generator = random.Random(0)
        ids = [generator.randrange(model.vocab_size) for _ in range(_PROBE_LENGTH)]
        _row(context, ids[:1], 0, 0)
        one = context.num_bytes(0)
        _row(context, ids[1:2], 0, 1)
        of_token = context.num_bytes(0) - one - _BYTES_OF_CELL
        if model.has_states:
            return LlamaSupport(of_token, "it has running states, which llama.cpp forks nowhere")
        if model.window:
            reason = f"some layers attend to {model.window} tokens, and llama.cpp drops the others"
            return LlamaSupport(of_token, reason)
        middle = _PROBE_LENGTH // 2
        wrong = [*ids[: middle - 1], (ids[middle - 1] + 1) % model.vocab_size, *ids[middle:]]
        _row(context, ids[2:middle], 0, 2)
        _row(context, wrong[:middle][::-1], 0, middle)  # which is to be cut off again
        context.do([Copy(0, 1, 0, middle), Cut(0, middle)])
        forked = _row(context, ids[middle:], 1, middle)
        other = _row(context, ids[middle:], 0, middle)
        whole, of_wrong = _row(context, ids, 2, 0), _row(context, wrong, 3, 0)
        tolerance = max(_ROUNDING, _SHARE_OF_SPREAD * _distance(whole, of_wrong))
        difference = max(_distance(forked, whole), _distance(other, whole))
        if not difference <= tolerance:
            return LlamaSupport(of_token, f"rows of forks differ by {difference:.2g}")
        return LlamaSupport(of_token)
    finally:
        context.close()


def _row(context: LlamaContext, ids: list[int], sequence: int, start: int) -> torch.Tensor:
    has_output = np.zeros(len(ids), np.int8)
    has_output[-1] = 1
    tokens, positions = np.array(ids, np.int32), np.arange(start, start + len(ids), dtype=np.int32)
    sequences = np.full(len(ids), sequence, np.int32)
    return context.compute(tokens, positions, sequences, has_output)[0].log_softmax(-1)


def _distance(row: torch.Tensor, other: torch.Tensor) -> float:
    return float((row - other).abs().max())
