"""VLLMLoader: a recipe that loads a model of vLLM somewhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from genlm_backend.backends.loading import check_holds, check_reachable, explained, resolve_name
from genlm_backend.backends.vllm.release import check_release
from genlm_backend.backends.vllm.session_engine import SessionEngine
from genlm_backend.backends.vllm.vllm_evaluator import VLLMEvaluator
from genlm_backend.checks import mapping, optional, text


@final
class VLLMLoader:
    """Loads a model of vLLM when it is called, in whatever process that is; it pickles.

    For a ``ProcessEvaluator`` or a ``RayEvaluator``, and so for ``AsyncReplicas`` of vLLM: each
    replica is an engine with sessions and prefix caching of its own.

    Args:
        model_name: A repository on the hub, a local directory, or ``"smollm2"``.
        engine_opts: For ``vllm.LLM``, as in ``AsyncVirtualLM.from_name``.

    Raises:
        OptionTypeError: (``TypeError``) If one is of a wrong type.
    """

    def __init__(self, model_name: str, engine_opts: Mapping[str, Any] | None = None) -> None:
        self.model_name = text("model_name", model_name)
        self.engine_opts = dict(optional(mapping)("engine_opts", engine_opts) or {})

    def __call__(self) -> VLLMEvaluator:
        """Load the model."""
        # The tokenizer is needed where the replicas are asked, and not here.
        options = {"skip_tokenizer_init": True, **self.engine_opts}
        return VLLMEvaluator(load_engine(self.model_name, options), torch.device("cpu"))


def load_engine(model_name: str, engine_opts: Mapping[str, Any]) -> SessionEngine:
    """Load a model with vLLM, if its release can be used."""
    check_release()
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine

    path = resolve_name(model_name)
    with explained(model_name):
        check_holds(path, "config.json", "params.json")
        check_reachable(path)
        return VLLMEngine.load(path, dict(engine_opts))
