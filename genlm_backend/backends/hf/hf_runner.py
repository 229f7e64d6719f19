"""HFRunner: calls of a model's twins, with packed batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from genlm_backend.attention.attend import AttentionBackend
from genlm_backend.attention.packing import ForwardBatch, TokenChunk, pack
from genlm_backend.attention.torch.torch_row_states import TorchBatchStates
from genlm_backend.backends.hf import fused_residuals
from genlm_backend.backends.hf.fused_rotary import fuse_rotary
from genlm_backend.backends.hf.lora import adapters_of, layers_of_peft, put_adapter
from genlm_backend.backends.hf.merged_linear import merge_linear_layers
from genlm_backend.backends.hf.model_state import ModelSnapshot
from genlm_backend.backends.hf.packed_weights import PackedWeights
from genlm_backend.backends.hf.step_graphs import CudaGraphRunner
from genlm_backend.backends.hf.twin import ModelView, twin_of
from genlm_backend.errors import AdapterError
from genlm_backend.model.query import Adapter
from genlm_backend.passes.forwards import Runner
from genlm_backend.prefix.states import StateLayout

logger = logging.getLogger(__name__)

_MOST_APART: Final = 0.125
"""Distance of the logits of a fused model from those of its own code, over their size."""


@final
class HFRunner(Runner):
    """Forward passes of a model, by a twin for each adapter and one for the model as it came."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.twin: Any = ModelView(model, is_apart=False)
        self.packed, self._state = PackedWeights(), ModelSnapshot(model, is_apart=False)
        # PEFT changes an adapter's own twin, so that neither other adapters nor the model change.
        self._twins: dict[Adapter | None, ModelView] = {None: self.twin}
        self.graphs: CudaGraphRunner | None = None
        self._is_unseen = False
        self.check_cancelled: Callable[[], object] = lambda: None
        self.num_forwards = 0
        self.tokens_computed = 0
        self.num_captured_steps = 0
        self.parameters: frozenset[str] = self.twin.parameters
        self.device = input_device(model)
        self.merges = False
        self._fuses = self.device.type in fused_residuals.KERNELS

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[TokenChunk] | ForwardBatch, attend: AttentionBackend
    ) -> torch.Tensor:
        """Return the logits at the outputs of each span: ``[num_outputs, model_vocab]``."""
        batch = spans if isinstance(spans, ForwardBatch) else pack(spans)
        graphs, logits = self.graphs, None
        plan = None if graphs is None else graphs.plan(self.twin, batch)
        if plan is not None and graphs is not None:
            logits = graphs.replayed(plan, self.twin, batch)
        if self._is_unseen and self._check():  # while the device computes
            logits = None  # of the model as it was
            plan = None if graphs is None else graphs.plan(self.twin, batch)
        if logits is None:
            logits = self._launched(batch, attend)
            if plan is not None and graphs is not None:
                graphs.learn(plan, self.twin, batch, logits)
        else:
            self.num_captured_steps += 1
        self.num_forwards += 1
        self.tokens_computed += batch.num_new_tokens
        return logits

    def _launched(self, batch: ForwardBatch, attend: AttentionBackend) -> torch.Tensor:
        """Run a pass operator by operator."""
        with attend.forward_context(batch, self.twin.module) as given:
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
            return self.twin.logits(batch, inputs)

    def running_states(
        self, layout: StateLayout, before: Sequence[torch.Tensor] | None
    ) -> TorchBatchStates:
        return TorchBatchStates(layout, before)

    def caching(self, is_wanted: bool) -> dict[str, bool]:
        """Return the argument that has a model keep what it reads, or not, if it takes one."""
        return {"use_cache": is_wanted} if "use_cache" in self.parameters else {}

    # ---------------------------------------------------------------- twins

    def try_twins(self, token_ids: torch.Tensor) -> None:
        """Find out which twins the model has; see ``twin_of``."""
        twin = self._twins[None] = twin_of(self.model, token_ids, **self.caching(False))
        plain = self._logits(twin, token_ids) if self._fuses else None
        self._dress(twin)
        if plain is not None and not _are_alike(self._logits(twin, token_ids), plain):
            kind = type(self.model).__name__
            logger.warning("layers of %s run as they are written: fused, they differ", kind)
            self._fuses = False
            twin.undress()
            self._dress(twin)
        self._state = ModelSnapshot(self.model, is_apart=bool(twin.copies))

    @torch.inference_mode()
    def _logits(self, twin: ModelView, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = twin.module(input_ids=token_ids, **self.caching(False)).logits
        return found.float()

    def take(self, adapter: Adapter | None) -> None:
        """Compute with an adapter in the passes to come, or as the model came."""
        # The model is checked before every batch. A recorded pass is launched before the check, and
        # its results are dropped if the model has changed.
        self.twin, self._is_unseen = self._twins[adapter], True
        if self.graphs is None:
            self._check()

    def _check(self) -> bool:
        """Check the model and what has been packed; return whether twins were dressed again."""
        has_changed = self._state.check()
        if has_changed:
            self._dress_again()
        self.packed.check()
        self._is_unseen = False
        return has_changed

    def _dress_again(self) -> None:
        if self.graphs is not None:
            self.graphs.forget()
        for twin in self._twins.values():
            twin.undress()
            self._dress(twin)

    def twin_with(self, adapter: Adapter | None) -> ModelView:
        """Return the twin that computes with an adapter, or as the model came."""
        self._check()
        return self._twins[adapter]

    def _dress(self, twin: ModelView) -> None:
        """Give a twin what passes need in addition to its weights."""
        self.packed.place(twin.copies)
        if self._fuses:
            fused_residuals.fuse_norms(twin.copies)
            if self.merges:
                merge_linear_layers(twin.copies)
            fused_residuals.fuse_residuals(twin.copies)
        fuse_rotary(twin.copies)  # on a device that has the kernel
        twin.pick()
        twin.ask_between_layers(lambda: self.check_cancelled())

    def load(self, adapter: Adapter, path: str, is_cached: bool) -> None:
        """Load an adapter in PEFT's format, and try it."""
        self._check()
        if adapter.name in adapters_of(self.model):
            raise AdapterError(
                f"there is an adapter named {adapter.name!r} already, of the model's owner"
            )
        if any(layer.merged_adapters for layer in layers_of_peft(self.model)):
            raise AdapterError(
                "an adapter of the model's owner is merged into its weights, so that no other one "
                "can be used: unmerge it, and wrap the model again"
            )
        twin, bare = (self._twins[None].another() for _ in range(2))
        put_adapter(path, twin, bare, is_cached)
        self._dress(twin)
        self._twins[adapter] = twin

    def remove(self, adapter: Adapter) -> None:
        del self._twins[adapter]

    def look_again(self) -> None:
        """Look at weights, and at code that is called in another form, which may be others now."""
        self.packed.pack_again()
        self._dress_again()

    def close(self) -> None:
        self.packed.clear()
        for twin in self._twins.values():
            twin.close()
        self._twins.clear()
        del self._state  # which refers to the parameters
        self.model = self.twin = self.graphs = None


def input_device(model: Any) -> torch.device:
    embeddings = model.get_input_embeddings()
    for parameter in embeddings.parameters() if embeddings is not None else ():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device(model.device)


def _are_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits differ by no more than rounding in 16 bits, NaN being equal to NaN."""
    found, expected = found.nan_to_num(), expected.nan_to_num()
    return bool((found - expected).norm() <= _MOST_APART * expected.norm())
