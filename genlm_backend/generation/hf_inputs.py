"""What ``model.generate`` of transformers takes, as what is generated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from genlm_backend.errors import ContextError, GenerationConfigError
from genlm_backend.generation.config import SHARED_FIELDS, GenerationConfig

HONOURED = (*SHARED_FIELDS, "pad_token_id", "num_return_sequences", "seed")
"""The ``generation_kwargs`` that are honoured: those of ``model.generate``, and ``seed``."""


def config_of_kwargs(
    base: GenerationConfig, kwargs: Mapping[str, Any], row: int
) -> GenerationConfig:
    """Return the configuration of one row of a task, whose random stream is its own.

    Args:
        base: The model's own defaults.
        kwargs: As for ``model.generate``, and ``seed``.
        row: Which row.

    Raises:
        GenerationConfigError: (``ValueError``) Naming what is not honoured, or wrong.
    """
    for name in kwargs:
        if name not in HONOURED:
            raise GenerationConfigError(
                f"{name} is not honoured here; these are: {', '.join(HONOURED)}"
            )
    fields = dict(kwargs)
    fields.pop("pad_token_id", None)
    if "num_return_sequences" in fields:
        fields["n"] = fields.pop("num_return_sequences")
    if fields.get("seed") is not None:
        fields["seed"] += row
    if not fields.get("do_sample", base.do_sample):
        for name in ("temperature", "top_k", "top_p", "min_p"):
            fields.pop(name, None)  # model.generate does not look at them either
        base = GenerationConfig(
            max_new_tokens=base.max_new_tokens,
            max_length=base.max_length,
            eos_token_id=base.eos_token_id,
            repetition_penalty=base.repetition_penalty,
            no_repeat_ngram_size=base.no_repeat_ngram_size,
        )
    has_length = base.max_new_tokens is not None or base.max_length is not None
    if not has_length and not {"max_new_tokens", "max_length"} & set(fields):
        fields["max_new_tokens"] = 20  # as model.generate
    return base.replace(**fields)


def rows_of(
    inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids ``[batch, length]`` and which of them count, bool of the same shape."""
    is_mapping = isinstance(inputs, Mapping)
    if is_mapping and "input_ids" not in inputs:
        raise ContextError(f"the inputs have no 'input_ids', only {sorted(inputs)}")
    ids = torch.as_tensor(inputs["input_ids"] if is_mapping else inputs)
    if ids.numel() == 0:
        raise ContextError("the inputs are empty: a context needs at least one token")
    given = inputs.get("attention_mask") if is_mapping else None
    if ids.is_floating_point() or ids.dtype is torch.bool or ids.ndim not in (1, 2):
        raise ContextError(
            f"token ids must be integers of shape [length] or [batch, length], got {ids.dtype} "
            f"of shape {list(ids.shape)}"
        )
    rows = ids.cpu().long().reshape(-1, ids.shape[-1])
    if given is None:
        return rows, torch.ones_like(rows, dtype=torch.bool)
    mask = torch.as_tensor(given).cpu().bool().reshape(-1, torch.as_tensor(given).shape[-1])
    if mask.shape != rows.shape:
        raise ContextError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(rows.shape)}"
        )
    return rows, mask
