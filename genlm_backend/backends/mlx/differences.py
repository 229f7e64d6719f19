"""Where mlx-lm computes otherwise than transformers: both are asked, by tiny models of a config."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import torch
from mlx_lm.models.cache import make_prompt_cache

logger = logging.getLogger(__name__)

_WINDOW: Final = 6
_LENGTHS: Final = (1, _WINDOW, 24)
_SEED: Final = 0
NOTABLE: Final = 0.01
"""The largest distance of log-probabilities that is told of nobody: activations that one of the
libraries approximates make half of it."""


def _named(size: int, *names: str) -> dict[str, int]:
    return dict.fromkeys(names, size)


_SMALL: Final = {
    **_named(64, "vocab_size", "vocab_size_per_layer_input", "hidden_size", "d_model", "n_embd"),
    **_named(256, "intermediate_size", "n_inner", "ffn_hidden_size"),  # some count on 4 × 64
    **_named(96, "dense_intermediate_size", "intermediate_size_mlp"),
    **_named(32, "moe_intermediate_size", "shared_expert_intermediate_size", "lru_width"),
    **_named(32, "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    **_named(32, "expert_ffn_hidden_size", "hidden_size_per_layer_input"),
    **_named(8, "num_hidden_layers", "n_layer", "n_layers"),  # of every kind that recurs
    **_named(4, "num_attention_heads", "n_head", "n_heads", "linear_num_value_heads"),
    **_named(2, "linear_num_key_heads"),
    **_named(16, "head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
    **_named(32, "q_lora_rank", "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim"),
    **_named(32, "index_head_dim", "index_n_heads"),
    **_named(16, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    **_named(2, "num_experts_per_tok", "moe_k", "moe_topk", "n_group"),
    **_named(1, "topk_group"),
    **_named(16, "state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head"),
    **_named(16, "mamba_head_dim", "mamba_chunk_size", "chunk_size"),
    **_named(8, "mamba_num_heads", "mamba_n_heads"),
    **_named(2, "mamba_n_groups", "n_groups"),
    **_named(4, "time_step_rank", "mamba_dt_rank"),
    **_named(8, "rotary_dim"),
    **_named(_WINDOW, "sliding_window", "attention_window_size", "attention_chunk_size"),
    **_named(_WINDOW, "sliding_window_size", "index_topk"),
    **_named(0, "pad_token_id"),
    **_named(1, "bos_token_id"),
    **_named(2, "eos_token_id"),
}
"""The most that a tiny model has of what configs of transformers call by these names."""


def warn_of_differences(model: Any, config: Mapping[str, Any], load: Callable[[Path], Any]) -> None:
    """Warn where a model that mlx-lm has loaded has other rows than in transformers.

    Code of mlx-lm leaves out what some entries of a config say, or weights, or does in another
    order what transformers does. That is not looked up in a list but asked, by ``distances``.
    """
    found, kind = distances(config, load), config.get("model_type")
    longest, window = max(_LENGTHS), _unread_window(model, config)
    if window is not None and _worst(found, longest) > NOTABLE:
        longest = min(window, _WINDOW)
        warnings.warn(
            f"mlx-lm leaves out the sliding window of {window} tokens that the config of this "
            f"{kind!r} names: contexts that are longer have other rows than in transformers",
            stacklevel=2,
        )
    worst = _worst(found, longest) if found else 0.0
    if worst > NOTABLE:
        warnings.warn(
            f"mlx-lm computes {kind!r} otherwise than transformers: log-probabilities of a tiny "
            f"random model of this config are up to {worst:.2g} apart in the two. The guide "
            "'MLX' names what is known of it; backend='hf' has the rows of transformers",
            stacklevel=2,
        )


def _worst(found: Mapping[int, float], longest: int) -> float:
    """Return the largest distance in contexts up to a length; infinite where none is known."""
    return max((d for length, d in found.items() if length <= longest), default=math.inf)


def _unread_window(model: Any, config: Mapping[str, Any]) -> int | None:
    """Return the window that a config names, if no layer of a model of mlx-lm seems to have it."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None
    if kinds and "sliding_attention" not in kinds:
        return None
    caches = make_prompt_cache(model)
    return window if all(getattr(c, "max_size", None) is None for c in caches) else None


def distances(config: Mapping[str, Any], load: Callable[[Path], Any]) -> dict[int, float]:
    """Return how far rows of a tiny model are apart in transformers and mlx-lm.

    It is of the same config but for its sizes and has random weights; transformers makes and saves
    it, and mlx-lm loads it.
    """
    small = _small(config)
    return {} if small is None else _distances(json.dumps(small, sort_keys=True), load)


def _small(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of a tiny model that is like that of another one in all but its sizes."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    if "text_config" in config:
        return None
    given = {k: v for k, v in config.items() if not k.startswith("quantization")}
    try:
        with _quiet():
            full: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(given).to_dict()
    except Exception as error:  # third-party code may raise anything of a strange config
        logger.debug("transformers does not take this config", exc_info=error)
        return None
    num_layers = full.get("num_hidden_layers", full.get("n_layer"))
    num_heads = full.get("num_attention_heads", full.get("n_head"))
    small = {name: _smaller(name, value, num_layers) for name, value in full.items()}
    of_keys = full.get("num_key_value_heads")
    if isinstance(of_keys, int):
        small["num_key_value_heads"] = 4 if of_keys == num_heads else min(of_keys, 2)
    dim = full.get("head_dim") or full.get("hidden_size", 0) // (num_heads or 1)
    return {name: _fewer_factors(value, dim) for name, value in small.items()}


def _smaller(name: str, value: Any, num_layers: Any) -> Any:
    """Return the value of an entry of a config in that of a tiny model."""
    if isinstance(value, list) and len(value) == num_layers:  # one for each layer
        return [_smaller(name, each, None) for each in value[: _SMALL["num_hidden_layers"]]]
    if name == "eos_token_id":
        return _SMALL[name]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return min(value, _SMALL.get(name, value))


def _fewer_factors(rope: Any, dim: int) -> Any:
    """Return rotary parameters whose lists of factors are those of smaller heads."""
    if not isinstance(rope, dict) or dim <= 0:
        return rope
    share = _SMALL["head_dim"] / dim
    return {
        name: value[: round(len(value) * share)]
        if isinstance(value, list)
        else _fewer_factors(value, dim)
        for name, value in rope.items()
    }


@functools.lru_cache(maxsize=64)
def _distances(config: str, load: Callable[[Path], Any]) -> dict[int, float]:
    """Return how far rows of both libraries are apart at most, by the length of a context."""
    if mx.default_device().type != mx.DeviceType.gpu:  # as for all models that are wrapped
        mx.disable_compile()
    generator = random.Random(_SEED)
    tiny = json.loads(config)
    ids = range(min(_SMALL["vocab_size"], tiny.get("vocab_size", 0)))
    try:
        contexts = [generator.choices(ids, k=length) for length in _LENGTHS]
        with tempfile.TemporaryDirectory() as folder, _quiet():
            wanted = _rows_and_directory(tiny, contexts, Path(folder))
            model = load(Path(folder))
            rows = [_row(model, context) for context in contexts]
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        logger.debug("no tiny model of this config", exc_info=error)
        return {}
    return {
        len(context): float((row - other).abs().max())
        for context, row, other in zip(contexts, rows, wanted, strict=True)
    }


def _rows_and_directory(
    config: dict[str, Any], contexts: list[list[int]], folder: Path
) -> list[torch.Tensor]:
    """Save a random model of transformers, and return its rows."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        small = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        with torch.no_grad():  # sharp enough that whatever is left out shows
            for weights in model.state_dict().values():
                if weights.dim() >= 2 and weights.is_floating_point():
                    weights.normal_(0, 1.5 / weights.shape[-1] ** 0.5)
                elif weights.is_floating_point():
                    weights.add_(torch.randn_like(weights), alpha=0.1)
    model.save_pretrained(folder)
    with torch.inference_mode():
        inputs = [torch.tensor([ids], dtype=torch.int64) for ids in contexts]
        rows = [model(input_ids=ids).logits[0, -1] for ids in inputs]
    return [row.float().log_softmax(-1) for row in rows]


def _row(model: Any, context: list[int]) -> torch.Tensor:
    logits = model(mx.array([context]), cache=make_prompt_cache(model))[0, -1]
    return torch.tensor(logits.astype(mx.float32).tolist(), dtype=torch.float32).log_softmax(-1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers say nothing of a model that nobody has asked for."""
    from transformers.utils import logging as own

    level, shows_bars = own.get_verbosity(), own.is_progress_bar_enabled()
    own.set_verbosity_error()
    own.disable_progress_bar()
    try:
        yield
    finally:
        own.set_verbosity(level)
        if shows_bars:
            own.enable_progress_bar()
