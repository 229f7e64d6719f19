"""HFRunner: calls of a model's twin, with packed batches."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, final

import torch

from genlm_backend.attention.attend import Attend
from genlm_backend.attention.packing import PackedBatch, Span, pack
from genlm_backend.attention.torch import TorchRowStates
from genlm_backend.backends.hf.twin import Twin
from genlm_backend.passes.forwards import Runner
from genlm_backend.prefix import StateLayout


@final
class HFRunner(Runner):
    """Forward passes of one model: spans in, logits at the wanted positions out.

    Args:
        model: A causal language model of transformers.

    Attributes:
        model: As given.
        twin: What is run in its place; the model itself at first.
        device: Device on which it takes its token ids.
        parameters: Names of what its ``forward`` takes.
        num_forwards: Number of passes so far.
        tokens_computed: Number of tokens in them, padding not counted.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.twin: Any = Twin(model, is_apart=False)
        self.num_forwards = 0
        self.tokens_computed = 0
        self.parameters = parameters_of(model)
        self.device = input_device(model)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span] | PackedBatch, attend: Attend) -> torch.Tensor:
        """Return the logits at the outputs of each span: ``[num_outputs, model_vocab]``.

        Args:
            spans: The spans, or what they have been packed to.
            attend: The way to attend.
        """
        batch = spans if isinstance(spans, PackedBatch) else pack(spans)
        with attend.attending(batch, self.twin.module) as given:
            inputs: dict[str, Any] = {
                "input_ids": batch.input_ids,
                "position_ids": batch.position_ids,
                **given,
            }
            for name in {"attention_mask", "position_ids"} - self.parameters:
                inputs.pop(name, None)
            if "past_key_values" not in self.parameters and "past_key_values" in inputs:
                inputs["cache_params"] = inputs.pop("past_key_values")
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor):
                    inputs[name] = value.to(self.device)
            logits = self.twin.logits(batch, inputs)
        self.num_forwards += 1
        self.tokens_computed += batch.num_new_tokens
        return logits

    def running_states(
        self, layout: StateLayout, before: Sequence[torch.Tensor] | None
    ) -> TorchRowStates:
        """Return the running states of the rows of a pass.

        Args:
            layout: Their tensors.
            before: States behind what the rows have, as a store reads them; ``None`` for rows that
                begin.
        """
        return TorchRowStates(layout, before)

    def caching(self, is_wanted: bool) -> dict[str, bool]:
        """Return the argument that has a model keep what it reads, or not, if it takes one."""
        return {"use_cache": is_wanted} if "use_cache" in self.parameters else {}


def input_device(model: Any) -> torch.device:
    """Return the device on which the model takes its token ids."""
    embeddings = model.get_input_embeddings()
    for parameter in embeddings.parameters() if embeddings is not None else ():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device(model.device)


def parameters_of(model: Any) -> frozenset[str]:
    """Return the names of what a model's forward takes, or that of the model which it is around."""
    names = {*inspect.signature(model.forward).parameters}
    if "kwargs" in names and hasattr(model, "get_base_model"):  # of PEFT, which hands them on
        names.update(inspect.signature(model.get_base_model().forward).parameters)
    return frozenset(names)
