"""HFLoader: what loads a model of transformers, here or in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from genlm_backend.llm.elsewhere.process import pickled
from genlm_backend.llm.hf.evaluator import HFEvaluator


@final
@dataclass(frozen=True, slots=True)
class HFLoader:
    """A name and options that make a model, and an evaluator of it.

    Attributes:
        path: Local path or repository on the hub.
        options: Keyword arguments of ``AutoModelForCausalLM.from_pretrained``.
        evaluator_options: Keyword arguments of ``HFEvaluator``.
    """

    path: str
    options: Mapping[str, Any]
    evaluator_options: Mapping[str, Any]

    def model(self) -> Any:
        """Load the model."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, **self.options)

    def __call__(self) -> HFEvaluator:
        """Load the model; return an evaluator of it whose rows are on the CPU."""
        from genlm_backend.llm.watching import bars_where_seen

        with bars_where_seen():
            model = self.model()
        cpu = torch.device("cpu")
        return HFEvaluator(model, output_device=cpu, **self.evaluator_options)

    def check_portable(self) -> None:
        """Check that the options can be given to another process.

        Raises:
            OptionTypeError: (``TypeError``) If one cannot.
        """
        for name, value in self.options.items():
            pickled(f"hf_opts[{name!r}]", value)
