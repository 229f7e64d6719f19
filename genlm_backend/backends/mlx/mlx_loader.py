"""MlxLoader: loads an mlx-lm model by name, and corrects what mlx-lm reads from its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from genlm_backend.backends.loading import check_holds, load_tokenizer, named_ends, resolve_name
from genlm_backend.errors import ModelNotFoundError, UnsupportedModelError

TESTED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("silu", "linear", "llama3", "yarn")),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmo2", "olmo3", "cohere"), ("silu",)),
    **dict.fromkeys(("granite", "glm", "stablelm", "mamba"), ("silu",)),
    **dict.fromkeys(("phi", "gptj"), ("gelu_new",)),
    "deepseek_v3": ("silu", "yarn"),
    "gemma3_text": ("gelu_pytorch_tanh",),
}
"""Model types → activation and non-default ``rope_type``s in tests against transformers."""

_ACTIVATIONS: Final = ("hidden_act", "hidden_activation", "activation_function")
_UNREAD: Final = {
    "attention_factor": None,
    "final_logit_softcapping": None,
    "layer_norm_epsilon": 1e-5,
    "rope_interleave": True,
    "use_bidirectional_attention": False,
}
"""Config entries that mlx-lm may ignore → the only value accepted besides ``None``."""

_LONG_MESSAGE: Final = 300
_FILES = ["*.json", "model*.safetensors", "*.py", "*.model", "*.jinja", "*.txt", "*.tiktoken"]


@final
@dataclass(frozen=True, slots=True)
class MlxLoader:
    """Loads a named mlx-lm model and its tokenizer."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    allow_untested: bool = False

    def tokenizer(self) -> Any:
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            options["revision"] = self.revision
        return load_tokenizer(self.name, **options)

    def ends(self) -> tuple[int, ...] | None:
        """Return the EOS ids in the model's files; ``None`` if they name none."""
        return named_ends(self.name, self.revision, self.trust_remote_code)

    def model(self) -> Any:
        path = resolve_name(self.name)
        if not Path(path).is_dir():
            from huggingface_hub import snapshot_download

            path = snapshot_download(path, revision=self.revision, allow_patterns=_FILES)
        check_holds(path, "config.json")
        return self._loaded(Path(path))

    def _loaded(self, path: Path) -> Any:
        from mlx_lm.utils import load_model

        if not [*path.glob("model*.safetensors")]:
            raise ModelNotFoundError(
                f"{self.name!r} has no weights in safetensors format: save it with "
                "save_pretrained of transformers, or convert it with mlx_lm.convert --hf-path "
                f"{self.name} --mlx-path …"
            )
        config = json.loads((path / "config.json").read_text())
        if not self.allow_untested:
            self._check(_untested(config))
        try:
            told = told_flat(config)
            model, _ = load_model(path, model_config=told, trust_remote_code=self.trust_remote_code)
            give_windows(model, config)
            give_parts_of_heads(model, {**config, **told})
        # mlx-lm's Olmo module exits the interpreter if another package is absent; a damaged file
        # raises a RuntimeError.
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RuntimeError,
            SystemExit,
        ) as error:
            kind, said = config.get("model_type"), str(error)
            said = said if len(said) <= _LONG_MESSAGE else f"{said[:_LONG_MESSAGE]} …"
            raise UnsupportedModelError(
                f"mlx-lm cannot load {self.name!r} (model_type {kind!r}): {said}"
            ) from error
        if not self.allow_untested and not has_windows(model, config):
            self._check("mlx-lm uses other sliding windows than the model's config")
        return model

    def _check(self, reason: str) -> None:
        """Raise an ``UnsupportedModelError`` if there is a ``reason`` why rows may differ."""
        if reason:
            raise UnsupportedModelError(
                f"{self.name!r} may have other rows in mlx-lm than in transformers: {reason}. Use "
                "backend='hf', or accept mlx-lm's rows with allow_untested=True"
            )


def _untested(config: Mapping[str, Any]) -> str:
    """Return why a model of this config may differ from transformers; ``""`` if tests cover it."""
    kind = config.get("model_type")
    if kind not in TESTED:
        return f"no test compares the rows for model_type {kind!r}"
    activation, *rope_types = TESTED[kind]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    for rope in ropes:
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", *rope_types):
            return f"no test compares the rows for {kind!r} with rope_type={rope_type!r}"
    for name in _ACTIVATIONS:
        if config.get(name) not in (None, activation):
            return f"no test compares the rows for {kind!r} with {name}={config[name]!r}"
    for name, value in _UNREAD.items():
        for entries in (config, *ropes):
            if entries.get(name) not in (None, value):
                return f"mlx-lm ignores {name}={entries[name]!r}"
    return ""


def has_windows(model: Any, config: Mapping[str, Any]) -> bool:
    """Return whether exactly the layers that the config names have sliding windows."""
    from mlx_lm.models.cache import make_prompt_cache

    is_used = config.get("sliding_window") and config.get("use_sliding_window") is not False
    caches = make_prompt_cache(model)
    kinds = config.get("layer_types") or ["sliding_attention"] * len(caches)
    wanted = [bool(is_used) and kind == "sliding_attention" for kind in kinds]
    return wanted == [getattr(cache, "max_size", None) is not None for cache in caches]


def told_flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config entries that mlx-lm reads under other names or needs explicitly."""
    # Transformers 5 writes rotary settings into ``rope_parameters``, which mlx-lm ignores for many
    # models: these would get the default ``rope_theta``. Configs also omit entries mlx-lm needs.
    pairs = {"n_ctx": "n_positions", "num_experts": "num_local_experts"}
    implied = {"rope_scaling": None, **{n: config[m] for n, m in pairs.items() if m in config}}
    implied = {n: value for n, value in implied.items() if config.get(n) is None}
    return {**implied, **_rotary(config)}  # rotary settings have priority, as in transformers


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings of transformers 5 under the names that mlx-lm reads."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return {}
    flat = parameters.get("full_attention", parameters)
    if not isinstance(flat, Mapping):
        return {}
    found: dict[str, Any] = {}
    if "rope_theta" in flat:
        found["rope_theta"] = found["rotary_emb_base"] = flat["rope_theta"]
    if "partial_rotary_factor" in flat:
        factor = flat["partial_rotary_factor"]
        found["partial_rotary_factor"] = found["rotary_pct"] = factor
    if flat.get("rope_type", "default") != "default":
        found["rope_scaling"] = {k: v for k, v in flat.items() if k != "rope_theta"}
        found["rope_scaling"]["type"] = flat["rope_type"]
    kinds = config.get("layer_types")
    if kinds and "full_attention" in kinds:  # Gemma 3: every n-th layer has no window
        found["sliding_window_pattern"] = kinds.index("full_attention") + 1
    local = parameters.get("sliding_attention")
    if isinstance(local, Mapping) and "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    return found


def give_windows(model: Any, config: Mapping[str, Any]) -> None:
    """Give every layer of a Mistral the sliding window that its config names."""
    window = config.get("sliding_window")
    inner: Any = getattr(model, "model", None)
    if config.get("model_type") != "mistral" or window is None or "layer_types" in config:
        return
    if type(inner).__module__ != "mlx_lm.models.llama" or inner.swa_idx is not None:
        return
    # mlx-lm runs Mistral as a Llama, whose layers have windows only if ``layer_types`` lists them.
    inner.sliding_window, inner.swa_idx = window, 0
    for layer in inner.layers:
        layer.use_sliding = True


def give_parts_of_heads(model: Any, told: Mapping[str, Any]) -> None:
    """Limit rotary embeddings to the part of each head that ``partial_rotary_factor`` gives."""
    # mlx-lm's GLM rotates whole heads.
    import mlx.nn as nn

    share, dim = told.get("partial_rotary_factor"), told.get("head_dim")
    if not isinstance(share, float) or not isinstance(dim, int):
        return
    for module in model.modules():
        if isinstance(module, nn.RoPE) and module.dims == dim:
            module.dims = int(dim * share)
