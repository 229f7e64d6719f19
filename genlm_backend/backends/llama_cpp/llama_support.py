"""Abilities of a GGUF model: found by a few tiny passes, not by its name."""

from __future__ import annotations

import random
from typing import Final, NamedTuple, final

import numpy as np
import torch

from genlm_backend.backends.llama_cpp.gguf_model import GGUFModel
from genlm_backend.backends.llama_cpp.llama_context import ContextSize, LlamaContext
from genlm_backend.backends.llama_cpp.sequence_states import SequenceCounts

_PROBE_LENGTH: Final = 12
_SHARE_OF_SPREAD: Final = 0.02
_ROUNDING: Final = 1e-3
_BYTES_OF_CELL: Final = 12
"""Bytes of a token's position and sequence in a saved state, besides its keys and values."""


@final
class LlamaSupport(NamedTuple):
    """Abilities of a model."""

    bytes_per_token: int
    bytes_per_state: int = 0
    reason: str = ""


def llama_cpp_probe(model: GGUFModel, num_threads: int, cell_type: int) -> LlamaSupport:
    """Find out what llama.cpp can do with a model, in a small context of its own."""
    # A context forked from the middle of another one is compared with the same one computed alone.
    # The cache is used if the difference is rounding, compared with that of a wrong token.
    num_cells, most_tokens = 8 * _PROBE_LENGTH, 4 * _PROBE_LENGTH
    has_states = int(model.has_states)
    counts = SequenceCounts(4, has_states, most_rows=has_states)
    size = ContextSize(num_cells, counts, most_tokens, num_threads, cell_type)
    context = LlamaContext(model, size)
    try:
        generator = random.Random(0)
        ids = [generator.randrange(model.vocab_size) for _ in range(_PROBE_LENGTH)]
        middle, state = _PROBE_LENGTH // 2, context.first_state
        wrong = [*ids[: middle - 1], (ids[middle - 1] + 1) % model.vocab_size, *ids[middle:]]
        nothing = context.num_bytes(0)
        _row(context, ids[:1], 0)
        one = context.num_bytes(0)
        of_state = context.num_bytes(context.first_passed) - nothing if has_states else 0
        _row(context, ids[1:2], 0, 1)
        of_token = max(0, context.num_bytes(0) - one - _BYTES_OF_CELL)
        _row(context, ids[2:middle], 0, 2)
        if has_states:
            context.copy_state(context.first_passed, state)
        _row(context, wrong[:middle][::-1], 0, middle)  # which is to be cut off again
        context.copy(0, 1, middle)
        context.cut(0, middle)
        forked = _row(context, ids[middle:], 1, middle, state)
        other = _row(context, ids[middle:], 0, middle, state)
        whole, of_wrong = _row(context, ids, 2), _row(context, wrong, 3)
        tolerance = max(_ROUNDING, _SHARE_OF_SPREAD * _distance(whole, of_wrong))
        difference = max(_distance(forked, whole), _distance(other, whole))
        is_same = difference <= tolerance
        reason = "" if is_same else f"rows of forks differ by {difference:.2g}"
        return LlamaSupport(of_token, of_state, reason)
    finally:
        context.close()


def _row(
    context: LlamaContext, ids: list[int], sequence: int, start: int = 0, state: int | None = None
) -> torch.Tensor:
    """Return the row after tokens that go on in a sequence, and from a state if there is one."""
    has_output = np.zeros(len(ids), np.int8)
    has_output[-1] = 1
    tokens, positions = np.array(ids, np.int32), np.arange(start, start + len(ids), dtype=np.int32)
    rows, before = np.array([sequence]), context.first_passed if state is None else state
    with context.in_states(rows, np.array([before]) if start else None):
        sequences = np.full(len(ids), sequence, np.int32)
        logits = context.compute(tokens, positions, sequences, has_output)
        if context.model.has_states:
            context.passed_states(rows)
    return logits[0].log_softmax(-1)


def _distance(row: torch.Tensor, other: torch.Tensor) -> float:
    return float((row - other).abs().max())
