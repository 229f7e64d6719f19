"""Arguments of ``model.generate`` of transformers, as the ones here."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from genlm_backend.checks import checked, integer, optional, shown
from genlm_backend.errors import ContextError, GenerationConfigError
from genlm_backend.generation.config import DEFAULT_MAX_NEW_TOKENS, GenerationConfig
from genlm_backend.generation.hf_config import SHARED_FIELDS
from genlm_backend.model.context import Context, Contexts
from genlm_backend.model.sampling import seed_of

HONOURED = (*SHARED_FIELDS, "early_stopping", "num_return_sequences", "pad_token_id", "seed")
"""The ``generation_kwargs`` that are honoured: those of ``model.generate``, and ``seed``."""


def config_of_kwargs(
    defaults: Any, kwargs: Mapping[str, Any], row: int, width: int = 0
) -> GenerationConfig:
    """Return the configuration of one row of a task, whose random stream is its own.

    As in ``model.generate``, the padding of a row counts for ``max_length`` and ``min_length``,
    and a text has no end but its length where there is no ``eos_token_id``.
    """
    merged, ours = copy.deepcopy(defaults), {}
    for name, value in kwargs.items():
        if name not in HONOURED:
            raise GenerationConfigError(
                f"{name} is not honoured here; these are: {', '.join(HONOURED)}"
            )
        if name in _APART:
            checked(_APART, {name: value}, GenerationConfigError)
        else:
            setattr(merged, name, _plain(name, value))
    if kwargs.get("seed") is not None:
        ours["seed"] = seed_of(_SEED("seed", kwargs["seed"]), row)
    if merged.max_new_tokens is None and merged.max_length is None:
        merged.max_new_tokens = DEFAULT_MAX_NEW_TOKENS
    config = GenerationConfig.from_hf(merged)
    if merged.eos_token_id is None:
        ours["eos_token_id"] = ()
    return config.replace(**ours, **_new_tokens(config, width))


def _new_tokens(config: GenerationConfig, width: int) -> dict[str, int | None]:
    """The lengths of a configuration as numbers of new tokens after ``width`` others."""
    most, least = config.max_new_tokens, config.min_new_tokens
    if config.max_length is not None:
        most = config.max_length - width
        if most < 1:
            raise ContextError(
                f"the inputs are {width} tokens wide with their padding, and leave no room for "
                f"another: max_length is {config.max_length}"
            )
    if config.min_length:
        least = max(config.min_length - width, 0)
    assert most is not None
    return {
        "max_new_tokens": most,
        "max_length": None,
        "min_new_tokens": min(least, most),
        "min_length": 0,
    }


_SEED = integer(0)

_APART = {"seed": optional(_SEED), "pad_token_id": optional(integer())}
"""Checks of what is honoured and is not of the configuration."""


def _plain(name: str, value: Any) -> Any:
    """Return arrays and tensors as lists and numbers, which configurations can compare."""
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except (TypeError, RuntimeError) as error:
        raise GenerationConfigError(f"{name} holds no numbers: {shown(value)}") from error


_KNOWN_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
"""Entries that collators make of texts; the last ones say nothing to a model that generates."""


def rows_of(
    inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any], contexts: Contexts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids ``[batch, length]`` and which of them count, bool of the same shape."""
    is_mapping = isinstance(inputs, Mapping)
    if is_mapping and "input_ids" not in inputs:
        raise ContextError(f"the inputs have no 'input_ids', only {sorted(inputs)}")
    unknown = sorted(inputs.keys() - _KNOWN_INPUTS) if is_mapping else []
    if unknown and contexts.image_token_id is None:
        raise ContextError(
            f"a text model cannot read {', '.join(map(repr, unknown))}; the inputs may have "
            f"{', '.join(sorted(_KNOWN_INPUTS))}"
        )
    ids = _tensor("input_ids", _listed(inputs["input_ids"] if is_mapping else inputs, contexts))
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
    mask = _tensor("attention_mask", given).cpu().bool()
    mask = mask.reshape(-1, mask.shape[-1]) if mask.ndim else mask
    if mask.shape != rows.shape:
        raise ContextError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(rows.shape)}"
        )
    return rows, mask


def pictures_of(inputs: Any, rows: torch.Tensor, mask: torch.Tensor) -> dict[str, Any] | None:
    """Return the inputs that a processor has made of pictures; ``None`` where there are none."""
    if not isinstance(inputs, Mapping) or not inputs.keys() - _KNOWN_INPUTS:
        return None
    if len(rows) != 1 or not mask.all():
        raise ContextError(
            "inputs with pictures are one row without padding: submit a task for each prompt"
        )
    left = {"input_ids", "attention_mask", "labels"}
    return {name: value for name, value in inputs.items() if name not in left}


def _listed(value: Any, contexts: Contexts) -> Any:
    """Return each ``Context`` as a list, and whatever else it is as it came."""
    if isinstance(value, Context):
        if value.pictures is not None:
            raise ContextError(
                "a task takes pictures as their processor returns them, with 'pixel_values'; an "
                "engine's requests take a Context that begins with them"
            )
        return list(contexts.of(value))
    if isinstance(value, (list, tuple)) and any(isinstance(row, Context) for row in value):
        return [_listed(row, contexts) for row in value]
    return value


def _tensor(name: str, value: Any) -> torch.Tensor:
    wanted = f"{name} must be integers of shape [length] or [batch, length], got {shown(value)}"
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ContextError(f"{wanted}{_hint(value)}") from error
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        raise ContextError(wanted)
    return tensor


def _hint(value: Any) -> str:
    """Return a hint for texts, chats and rows of several lengths."""
    first, depth = value, 0
    while isinstance(first, (list, tuple)) and first and depth < 3:
        first, depth = first[0], depth + 1
    if isinstance(first, (str, bytes, Mapping)):
        return ": a text or a chat goes through the model's tokenizer first"
    return ": rows are padded to one length, beside an attention_mask" if depth > 1 else ""
