"""Conversion of a transformers configuration to the fields of a ``GenerationConfig``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from operator import not_
from typing import Any

from genlm_backend.errors import GenerationConfigError
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.readouts.sampling import listed_ids

SHARED_FIELDS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
    "max_length",
    "min_length",
    "min_new_tokens",
    "eos_token_id",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "num_beams",
    "length_penalty",
)
"""Fields of ``GenerationConfig`` with the same name and meaning in transformers."""

_HF_TOP_K = 50
"""The ``top_k`` with which transformers samples by default."""

_HONOURED_BESIDE = {"early_stopping", "num_return_sequences"}
"""Keys of a transformers configuration that become fields with another name."""

_WITHOUT_EFFECT = {
    *("transformers_version", "_from_model_config"),
    *("bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "use_cache", "cache_config", "max_cache_len", "low_memory"),
    *("compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config"),
    # Only speculative decoding reads the next ten keys, and it does not change the text.
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_early_exit", "use_mtp"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type"),
    "diversity_penalty",  # read only with num_beam_groups > 1, which is refused
}
"""Keys of a transformers configuration that never change the text, whatever their value."""

_OF_SAMPLING = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
"""Keys of a transformers configuration that have an effect only with ``do_sample``."""

_OF_BEAMS = {"renormalize_logits"}
"""Keys of a transformers configuration that have an effect only in a beam search."""

_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "begin_suppress_tokens": not_,
    "cache_implementation": lambda value: value != "quantized",
    "encoder_no_repeat_ngram_size": lambda value: value == 0,
    "encoder_repetition_penalty": lambda value: value == 1,
    "epsilon_cutoff": lambda value: not 0 < value < 1,
    "eta_cutoff": lambda value: not 0 < value < 1,
    "exponential_decay_length_penalty": lambda value: value[1] == 1,
    "guidance_scale": lambda value: value == 1,
    "is_assistant": not_,
    "num_beam_groups": lambda value: value <= 1,
    "penalty_alpha": lambda value: value <= 0,
    "remove_invalid_values": not_,
    "renormalize_logits": not_,
    "suppress_tokens": not_,
    "token_healing": not_,
    "typical_p": lambda value: value >= 1,
}
"""Key → function that returns whether a value other than ``None`` leaves the text unchanged."""


def own_config(lm: AsyncLM) -> Any:
    """Return a model's own ``transformers.GenerationConfig``, or ``None`` if it has none."""
    # Only models of transformers have a generation config; others may lack these attributes.
    config = getattr(getattr(lm, "model", None), "generation_config", None)
    named = None if config is None else listed_ids(config.eos_token_id)
    if config is None or named is None:
        return config
    # EOS ids outside the vocabulary are dropped, since they cannot be generated.
    known = [token_id for token_id in named if 0 <= token_id < len(lm.byte_vocab)]
    if len(known) < len(named):
        config = copy.deepcopy(config)
        config.eos_token_id = known if len(known) else None
    return config


def fields_of_hf(config: Any) -> dict[str, Any]:
    """Convert a transformers configuration to ``GenerationConfig`` fields with the same effect."""
    given = config.to_diff_dict()
    fields = {name: given[name] for name in SHARED_FIELDS if given.get(name) is not None}
    if given.get("num_return_sequences") is not None:
        fields["n"] = given["num_return_sequences"]
    num_beams = given.get("num_beams")  # not checked yet, so of any type
    is_search = isinstance(num_beams, int) and num_beams > 1
    if is_search:
        fields["beam_early_stopping"] = given.get("early_stopping") or False
    else:
        fields.pop("length_penalty", None)  # transformers ignores it too
    _check_neutral(config, given, is_search)
    if fields.get("do_sample"):
        fields.setdefault("top_k", _HF_TOP_K)
    else:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            fields.pop(name, None)  # transformers ignores them too
    for new, whole in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        if new in fields:
            fields.pop(whole, None)  # as in transformers, ``new`` takes precedence
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        if isinstance(fields.get(least), int) and isinstance(fields.get(most), int):
            fields[least] = min(fields[least], fields[most])
    return fields


def _check_neutral(config: Any, given: Mapping[str, Any], is_search: bool) -> None:
    """Raise a ``GenerationConfigError`` if an unsupported key would change the text."""
    ignored = {*SHARED_FIELDS, *_HONOURED_BESIDE, *_WITHOUT_EFFECT}
    ignored |= set() if config.do_sample else _OF_SAMPLING
    ignored |= set() if is_search else _OF_BEAMS
    # A key of transformers that no table has is of a newer release: only None is accepted.
    # Keys that transformers does not define, such as a checkpoint's own, are ignored.
    for name in sorted(vars(type(config)()).keys() & given.keys() - ignored):
        value = given[name]
        is_neutral = value is None or (name in _NEUTRAL and _NEUTRAL[name](value))
        if not is_neutral:
            raise GenerationConfigError(f"{name}={value!r} is not supported: leave it out")
