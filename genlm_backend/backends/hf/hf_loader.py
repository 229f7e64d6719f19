"""HFLoader: loads a model of transformers, in this process or in another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, final, get_args

import torch

from genlm_backend.backends.bundled import BUNDLED
from genlm_backend.backends.hf.architecture import check_architecture, check_complete
from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.backends.hf.options import (
    HFOptions,
    explained_options,
    hf_options,
    loading_options,
)
from genlm_backend.backends.loading import (
    check_has_tokenizer,
    check_holds,
    hub_options,
    resolve_name,
)
from genlm_backend.checks import Check, one_of, options_of, shown
from genlm_backend.errors import OptionError, OptionTypeError, PictureError
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.remote.process_evaluator import pickled
from genlm_backend.runtime.progress import bars_where_seen, stage
from genlm_backend.runtime.threads import freeze_imports

WeightFormat: TypeAlias = Literal["int8"]
"""Format to which this library can quantise a model's weights."""

check_weight_format: Final[Check[WeightFormat | None]] = one_of(None, *get_args(WeightFormat))


@final
@dataclass(frozen=True, slots=True)
class HFLoader:
    """The name and options to load a model, its tokenizer, its processor and its evaluator."""

    name: str
    path: str
    options: Mapping[str, Any]
    evaluator: HFOptions
    weights: WeightFormat | None = None

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        check_holds(self.path, "config.json")
        if "gguf_file" not in self.options:
            check_has_tokenizer(self.path)
        return AutoTokenizer.from_pretrained(self.path, **self._shared)

    @property
    def _shared(self) -> dict[str, Any]:
        """Options that the tokenizer, the processor, the config and the model share."""
        shared = ("revision", "token", "cache_dir", "trust_remote_code", "local_files_only")
        return {name: self.options[name] for name in shared if name in self.options}

    def processor(self) -> Any:
        """Load the model's processor of texts and pictures."""
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(self.path, **self._shared)
        except (OSError, ValueError, ImportError) as error:
            raise PictureError(
                f"the processor of {self.name!r} cannot be loaded: {error}"
            ) from error
        if not hasattr(processor, "image_processor"):
            raise PictureError(
                f"{self.name!r} has no processor for pictures, only a {type(processor).__name__}"
            )
        return processor

    def model(self) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
        from transformers.models.auto import modeling_auto

        # A bundled model is looked up again, since another process may have it elsewhere.
        path = resolve_name(self.name) if self.name in BUNDLED else self.path
        config, _ = PretrainedConfig.get_config_dict(path, **self._shared)
        check_architecture(self.name, config)
        seeing = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        sees = "vision_config" in config and config.get("model_type") in seeing
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        freeze_imports()
        with explained_options(self.options), stage(f"loading {self.name}"):
            loaded: Any = kind.from_pretrained(path, **self.options, output_loading_info=True)
        model, told = loaded
        check_complete(self.name, model, told["missing_keys"])
        if self.weights == "int8":
            from genlm_backend.backends.hf.int8_weights import quantize

            quantize(model)
        return model

    def __call__(self) -> HFEvaluator:
        """Load the model; return its evaluator, whose rows are on the CPU."""
        with bars_where_seen():
            model = self.model()
        return HFEvaluator(model, output_device=torch.device("cpu"), **self.evaluator)

    @classmethod
    def of_name(
        cls,
        model_id: str,
        bitsandbytes_opts: dict[str, Any] | None,
        hf_opts: dict[str, Any] | None,
        weights: Any,
        own: Mapping[str, Any],
        owner: type[AsyncLM],
    ) -> tuple[Self, dict[str, Any]]:
        """Check the options of ``from_name``; return the loader, and the options for ``owner``."""
        owner.check_options(own)
        evaluator = hf_options({"packs_weights": True, **own})
        options = loading_options(bitsandbytes_opts, hf_opts)
        for name in options.keys() & {*owner.option_checks, *options_of(HFOptions)}:
            raise OptionTypeError(f"{name} is an option of {owner.__name__}, not of hf_opts")
        wanted = check_weight_format("weights", weights)
        if wanted is not None:
            options = _on_cpu(wanted, options, hf_opts or {})
        path = resolve_name(model_id)
        if Path(path).is_dir():  # make the path valid in any working directory
            path = str(Path(path).absolute())
        loader = cls(str(model_id), path, {**hub_options(path), **options}, evaluator, wanted)
        others = {name: value for name, value in own.items() if name not in evaluator}
        return loader, {"processor": loader.processor, **others}

    def check_portable(self) -> None:
        """Check that the options for loading the model can be pickled for another process."""
        for name, value in self.options.items():
            pickled(f"hf_opts[{name!r}]", value)


def _on_cpu(
    weights: WeightFormat, options: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return options that load a model in float32 onto the CPU; refuse conflicting ones."""
    if "quantization_config" in options:
        raise OptionError(f"weights={weights!r} cannot be combined with another quantization")
    wanted = {"device_map": "cpu", "dtype": torch.float32}
    asked = {"dtype" if name == "torch_dtype" else name for name in given}
    for name, value in wanted.items():
        own = options[name] if name in asked else "auto"
        if own not in ("auto", value, str(value).removeprefix("torch."), torch.device("cpu")):
            raise OptionError(
                f"weights={weights!r} computes in float32 on the CPU: leave out {name}={shown(own)}"
            )
    return {**options, **wanted}
