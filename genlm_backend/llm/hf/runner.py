"""The only place that calls the model."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Sequence
from typing import Any, final

import torch

from genlm_backend.llm.hf.attend import Attend
from genlm_backend.llm.hf.model_state import ModelState
from genlm_backend.llm.hf.packing import PackedBatch, Span, pack
from genlm_backend.llm.hf.uncompiled import uncompiled


@final
class Runner:
    """Forward passes of one model: spans in, logits at the wanted positions out.

    Args:
        model: A causal language model of transformers.

    Attributes:
        model: As given.
        device: Device on which it takes its token ids.
        parameters: Names of what its ``forward`` takes.
        num_forwards: Number of passes so far.
        tokens_computed: Number of tokens in them, padding not counted.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.num_forwards = 0
        self.tokens_computed = 0
        self.parameters = _parameters(model)
        self.device = input_device(model)
        self._state = ModelState(model)

    def as_written(self) -> contextlib.AbstractContextManager[None]:
        """Return what has the model run its own code, where its owner has compiled it."""
        return uncompiled() if self._state.is_compiled else contextlib.nullcontext()

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span] | PackedBatch, attend: Attend) -> torch.Tensor:
        """Return the logits at each span's outputs, span by span: ``[num_outputs, model_vocab]``.

        Args:
            spans: The spans, or what they have been packed to.
            attend: The way to attend.

        Raises:
            ModelStateError: (``RuntimeError``) If the model has been converted, moved, put into
                training mode or configured otherwise.
        """
        batch = spans if isinstance(spans, PackedBatch) else pack(spans)
        self._state.check(self.model)
        with attend.attending(batch, self.model) as given:
            inputs: dict[str, Any] = {
                "input_ids": batch.input_ids,
                "position_ids": batch.position_ids,
                **given,
            }
            for name in {"attention_mask", "position_ids"} - self.parameters:
                inputs.pop(name, None)
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor):
                    inputs[name] = value.to(self.device)
            logits = self._select(batch, inputs)
        self.num_forwards += 1
        self.tokens_computed += batch.num_new_tokens
        return logits

    def _select(self, batch: PackedBatch, inputs: dict[str, Any]) -> torch.Tensor:
        """Run the model, projecting onto the vocabulary only where an output is wanted.

        A vocabulary is wide and a prompt long, so most of the projection would be thrown away.
        The hidden states are picked on their way into the output embedding, since what some
        families do behind it (scaling, soft caps) is then still done. Other threads may be using
        the model, so that the hook minds its own only.
        """
        thread, shape = threading.get_ident(), batch.input_ids.shape
        is_picked = is_over = False

        def pick(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            nonlocal is_picked
            if is_over or threading.get_ident() != thread:  # a copy of the model keeps the hook
                return None
            if not args or args[0].shape[:2] != shape:
                return None
            is_picked = True
            return _at_outputs(args[0], batch).unsqueeze(0), *args[1:]

        head = self.model.get_output_embeddings()
        hook = None if head is None else head.register_forward_pre_hook(pick)
        try:
            logits = self.model(**inputs).logits
        finally:
            is_over = True
            if hook is not None:
                hook.remove()
        return logits[0] if is_picked else _at_outputs(logits, batch)


def _at_outputs(states: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """From ``[B, Q, …]`` to ``[num_outputs, …]``."""
    rows, columns = batch.output_rows.to(states.device), batch.output_columns.to(states.device)
    return states[rows, columns]


def input_device(model: Any) -> torch.device:
    """Return the device on which the model takes its token ids."""
    embeddings = model.get_input_embeddings()
    for parameter in embeddings.parameters() if embeddings is not None else ():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device(model.device)


def _parameters(model: Any) -> frozenset[str]:
    """Return the names of what a model's forward takes, or that of the model which it is around."""
    names = {*inspect.signature(model.forward).parameters}
    if "kwargs" in names and hasattr(model, "get_base_model"):  # of PEFT, which hands them on
        names.update(inspect.signature(model.get_base_model().forward).parameters)
    return frozenset(names)
