"""Checks that checkpoints and loaded models are causal language models.

transformers also loads other checkpoints, and fills missing weights with random numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch

from genlm_backend.backends.hf.forward_names import returned_cache
from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.support import bounds, tried
from genlm_backend.checks import shown
from genlm_backend.errors import UnsupportedModelError

_PREDICTING: Final = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
"""Tasks of transformers whose models predict the next token."""

_REMEDY: Final = (
    "load a checkpoint of a causal language model, for example one whose config.json names an "
    "architecture …ForCausalLM"
)


def check_architecture(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another task's architecture, or of a type without a causal LM."""
    from transformers.models.auto import modeling_auto

    saved_by = [*(config.get("architectures") or ())]
    model_type = config.get("model_type")
    said = " or ".join(map(str, saved_by)) or f"model of type {model_type!r}"
    tables = vars(modeling_auto)
    names = [n for n in tables if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES")]
    predicting = _architectures(map(_mapping, _PREDICTING))
    # Checkpoints without a head, such as those of ``LlamaModel``, pass, since the head may be tied
    # to the embeddings. Architectures that transformers does not know pass this check too.
    others = _architectures(tables[name] for name in names)
    others -= predicting | _architectures([_mapping("")])
    if saved_by and not predicting.intersection(saved_by) and others.intersection(saved_by):
        raise UnsupportedModelError(
            f"{name!r} has the weights of a {said}, which is no causal language model: {_REMEDY}"
        )
    auto_map = config.get("auto_map") or {}
    known = {t for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT") for t in _mapping(task)}
    is_known = model_type in known or model_type is None
    if not is_known and not any("AutoModelFor" in key for key in auto_map):
        raise UnsupportedModelError(
            f"{name!r} is a {said}, and transformers has no causal language model of type "
            f"{model_type!r}: {_REMEDY}"
        )


def _mapping(task: str) -> Mapping[str, Any]:
    """Return the architectures of a task by model type; ``""`` is for models without a head."""
    from transformers.models.auto import modeling_auto

    middle = f"FOR_{task}_" if task else ""
    return getattr(modeling_auto, f"MODEL_{middle}MAPPING_NAMES", {})


def _architectures(mappings: Iterable[Mapping[str, Any]]) -> set[str]:
    values = [value for mapping in mappings for value in mapping.values()]
    return {name for own in values for name in ((own,) if isinstance(own, str) else own)}


def check_complete(name: str, model: Any, missing: Collection[str]) -> None:
    """Check that a checkpoint had all weights of the model that was loaded from it."""
    if missing:
        raise UnsupportedModelError(
            f"transformers would initialise weights of {type(model).__name__} at random, since "
            f"the checkpoint {name!r} lacks them: {shown(sorted(missing))}; {_REMEDY}, or load the "
            "model yourself, set these weights and wrap the model"
        )


@torch.inference_mode()
def check_predicts(runner: HFRunner, vocab_size: int) -> None:
    """Check by tiny passes that a model returns next-token logits and is no encoder."""
    model, name = runner.view.module, type(runner.model).__name__
    # Two contexts share their first two tokens. If the rows after these differ, attention is not
    # causal. Such a model still passes if it returns a cache (PaliGemma); encoders return none.
    contexts = [[i % vocab_size for i in context] for context in ((5, 6, 7, 8), (5, 6, 9, 10))]
    ids = torch.tensor(contexts, dtype=torch.int64, device=runner.device)
    with tried(runner):
        try:
            output = model(input_ids=ids, **runner.caching(False))
        except ValueError:  # classifiers raise it for several rows without a padding id
            output = model(input_ids=ids[:1], **runner.caching(False))
            if getattr(output, "logits", ids[:1]).shape[:2] == ids[:1].shape:
                raise
            ids = ids[:1]
    logits = getattr(output, "logits", None)
    if logits is None:
        raise UnsupportedModelError(
            f"{name} has no head that predicts the next token: wrap a model that "
            "AutoModelForCausalLM.from_pretrained loads"
        )
    if logits.shape[:-1] != ids.shape or logits.shape[-1] < vocab_size:
        raise UnsupportedModelError(
            f"{name} is no causal language model: for token ids of shape {tuple(ids.shape)} it "
            f"returns logits of shape {tuple(logits.shape)} instead of {(*ids.shape, vocab_size)}"
        )
    rows = logits.float().log_softmax(-1)
    distances = (rows[0] - rows[1]).square().mean(-1).sqrt()
    before, after = float(distances[:2].max()), float(distances[3])
    tolerance, share = bounds(model)
    if not getattr(model, "is_quantized", False):  # unquantised models round equal sums equally
        tolerance, share = tolerance / 100, share / 100
    if before <= max(tolerance, share * after):
        return
    with tried(runner):  # only now, since use_cache may break models without a cache
        output = model(input_ids=ids, **runner.caching(True))
    if returned_cache(output) is None:
        raise UnsupportedModelError(
            f"{name} is an encoder and no causal language model: another later token changes the "
            f"rows after earlier tokens by {before:.2g}, and the model returns no key-value cache "
            "to continue from (some encoders, such as BERT, become causal with is_decoder=True in "
            "the config, if they were trained that way)"
        )
