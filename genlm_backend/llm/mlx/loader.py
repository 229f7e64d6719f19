"""MlxLoader: what loads a model of mlx-lm by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from genlm_backend.errors import ModelNotFoundError, UnsupportedModelError
from genlm_backend.llm.loading import check_holds, load_tokenizer, resolve_name

_FILES = ["*.json", "model*.safetensors", "*.py", "*.model", "*.jinja", "*.txt", "*.tiktoken"]


@final
@dataclass(frozen=True, slots=True)
class MlxLoader:
    """A name that makes a model of mlx-lm and its tokenizer.

    Attributes:
        name: A repository on the hub, a local directory, or ``"smollm2"``.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Whether code that comes with the model may run.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False

    def tokenizer(self) -> Any:
        """Load the tokenizer, as transformers has it."""
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            options["revision"] = self.revision
        return load_tokenizer(self.name, **options)

    def model(self) -> Any:
        """Load the model.

        Raises:
            ModelNotFoundError: (``OSError``) If there is no model of that name with weights in
                MLX's or transformers' safetensors.
            UnsupportedModelError: (``ValueError``) If mlx-lm does not know its architecture.
        """
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
                f"{self.name!r} has no weights in safetensors: save it with save_pretrained of "
                f"transformers, or convert it: mlx_lm.convert --hf-path {self.name} --mlx-path …"
            )
        config = json.loads((path / "config.json").read_text())
        try:
            model, _ = load_model(
                path,
                model_config=told_flat(config),
                trust_remote_code=self.trust_remote_code,
            )
        except (ValueError, TypeError) as error:
            kind = config.get("model_type")
            raise UnsupportedModelError(
                f"mlx-lm does not load {self.name!r} (model_type {kind!r}): {error}"
            ) from error
        return model


def told_flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config says of rotary positions in the words that mlx-lm reads.

    Since release 5, transformers writes all of it into ``rope_parameters``, which mlx-lm leaves
    unread for many models: their positions would be turned at the default speed.
    """
    parameters = config.get("rope_parameters")
    found: dict[str, Any] = {}
    if not isinstance(parameters, Mapping):
        return found
    flat = parameters.get("full_attention", parameters)
    if not isinstance(flat, Mapping):
        return found
    if "rope_theta" in flat:
        found["rope_theta"] = flat["rope_theta"]
    if "partial_rotary_factor" in flat:
        found["partial_rotary_factor"] = flat["partial_rotary_factor"]
    if flat.get("rope_type", "default") != "default":
        found["rope_scaling"] = {k: v for k, v in flat.items() if k != "rope_theta"}
    kinds = config.get("layer_types")
    if kinds and "full_attention" in kinds:  # Gemma 3: every so many layers see all
        found["sliding_window_pattern"] = kinds.index("full_attention") + 1
    local = parameters.get("sliding_attention")
    if isinstance(local, Mapping) and "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    return {name: value for name, value in found.items() if config.get(name) is None}
