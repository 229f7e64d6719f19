"""HFRunner: runs forward passes through ``ModelView``s, copies of a model that share weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from genlm_backend.attention.forward_batch import AttentionBackend, ForwardBatch, Runner
from genlm_backend.attention.torch.torch_cache import TorchBatchStates
from genlm_backend.backends.hf import fused_residuals
from genlm_backend.backends.hf.cuda_graph_runner import CudaGraphRunner
from genlm_backend.backends.hf.fused_rotary import fuse_rotary
from genlm_backend.backends.hf.lora import adapters_of, layers_of_peft, put_adapter
from genlm_backend.backends.hf.merged_linear import merge_linear_layers
from genlm_backend.backends.hf.model_state import ModelSnapshot
from genlm_backend.backends.hf.model_view import ModelView, view_of
from genlm_backend.backends.hf.packed_weights import PackedWeights
from genlm_backend.errors import AdapterError
from genlm_backend.prefix.state_cache import StateLayout
from genlm_backend.queries.query import Adapter

logger = logging.getLogger(__name__)

_MOST_APART: Final = 0.125
"""Largest distance of fused logits from unfused ones, relative to the latter's norm."""


@final
class HFRunner(Runner):
    """Runs forward passes of a model, in one view for each adapter and one without any."""

    def __init__(
        self,
        model: Any,
        merges: bool = False,
        check_cancelled: Callable[[], object] = lambda: None,
    ) -> None:
        self.model: Any = model
        self._merges, self._check_cancelled = merges, check_cancelled
        self.view: Any = ModelView(model, is_apart=False)
        self.packed, self._state = PackedWeights(), ModelSnapshot(model, is_apart=False)
        # PEFT changes only the view of the adapter that it loads, not other views or the model.
        self._views: dict[Adapter | None, ModelView] = {None: self.view}
        self.graphs: CudaGraphRunner | None = None
        self._is_unseen = False
        self.num_captured_steps = 0
        self.parameters: frozenset[str] = self.view.parameters
        self.device = input_device(model)
        self._fuses = self.device.type in fused_residuals.RESIDUAL_KERNELS

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Return the logits at the outputs of a batch: ``[num_outputs, model_vocab]``."""
        graphs, logits = self.graphs, None
        plan = None if graphs is None else graphs.plan(self.view, batch)
        if plan is not None and graphs is not None:
            logits = graphs.replayed(plan, self.view, batch)
        if self._is_unseen and self._check():  # checks while the device computes
            logits = None  # computed by the model before its change
            plan = None if graphs is None else graphs.plan(self.view, batch)
        if logits is None:
            logits = self._launched(batch, attention)
            if plan is not None and graphs is not None:
                graphs.capture(plan, self.view, batch, logits)
        else:
            self.num_captured_steps += 1
        self.num_forwards += 1
        self.tokens_computed += batch.num_new_tokens
        return logits

    def _launched(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Run a pass eagerly; return the logits at its outputs."""
        with attention.forward_context(batch, self.view.module) as given:
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
            return self.view.logits(batch, inputs)

    def running_states(
        self, layout: StateLayout, before: Sequence[torch.Tensor] | None
    ) -> TorchBatchStates:
        return TorchBatchStates(layout, before)

    def caching(self, is_wanted: bool) -> dict[str, bool]:
        """Return ``use_cache`` as a keyword argument, or nothing if the model does not take it."""
        return {"use_cache": is_wanted} if "use_cache" in self.parameters else {}

    # ---------------------------------------------------------------- views

    def try_views(self, token_ids: torch.Tensor) -> None:
        """Make the view without an adapter (``view_of``); fuse its layers if logits stay alike."""
        view = self._views[None] = view_of(self.model, token_ids, **self.caching(False))
        plain = self._logits(view, token_ids) if self._fuses else None
        self._dress(view)
        if plain is not None and not _are_alike(self._logits(view, token_ids), plain):
            kind = type(self.model).__name__
            logger.warning("layers of %s run unfused, since fusing changes the logits", kind)
            self._fuses = False
            view.undress()
            self._dress(view)
        self._state = ModelSnapshot(self.model, is_apart=bool(view.copies))

    @torch.inference_mode()
    def _logits(self, view: ModelView, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = view.module(input_ids=token_ids, **self.caching(False)).logits
        return found.float()

    def activate(self, adapter: Adapter | None) -> None:
        """Run later passes with an adapter, or without one."""
        # The model is checked before each eager pass. A captured pass is launched before the check,
        # and its results are dropped if the model has changed.
        self.view, self._is_unseen = self._views[adapter], True
        if self.graphs is None:
            self._check()

    def _check(self) -> bool:
        """Check model and packed weights; reset views and return ``True`` if the model changed."""
        has_changed = self._state.check_settings()
        if has_changed:
            self._dress_again()
        self.packed.check_weights()
        self._is_unseen = False
        return has_changed

    def _dress_again(self) -> None:
        if self.graphs is not None:
            self.graphs.forget()
        for view in self._views.values():
            view.undress()
            self._dress(view)

    def view_with(self, adapter: Adapter | None) -> ModelView:
        """Check the model; return the view of an adapter, or the view without one."""
        self._check()
        return self._views[adapter]

    def _dress(self, view: ModelView) -> None:
        """Give a view packed layers, fused kernels, a head for outputs, and cancellation checks."""
        self.packed.place(view.copies)
        if self._fuses:
            fused_residuals.fuse_norms(view.copies)
            if self._merges:
                merge_linear_layers(view.copies)
            fused_residuals.fuse_residuals(view.copies)
        fuse_rotary(view.copies)  # does nothing on a device without the kernel
        view.pick()
        view.check_between_layers(self._check_cancelled)

    def load(self, adapter: Adapter, path: str, is_cached: bool) -> None:
        """Load an adapter in PEFT's format into a new view, and try it."""
        self._check()
        if adapter.name in adapters_of(self.model):
            raise AdapterError(
                f"the model already has an adapter named {adapter.name!r}, which was added "
                "without this library: choose another name"
            )
        if any(layer.merged_adapters for layer in layers_of_peft(self.model)):
            raise AdapterError(
                "an adapter that was added without this library is merged into the model's "
                "weights, so no other adapter can be used: unmerge it, and wrap the model again"
            )
        view, bare = (self._views[None].another() for _ in range(2))
        put_adapter(path, view, bare, is_cached)
        self._dress(view)
        self._views[adapter] = view

    def remove(self, adapter: Adapter) -> None:
        del self._views[adapter]

    def look_again(self) -> None:
        """Pack weights and fuse layers again, since weights or code may have changed."""
        self.packed.pack_again()
        self._dress_again()

    def close(self) -> None:
        self.packed.clear()
        for view in self._views.values():
            view.close()
        self._views.clear()
        del self._state  # which refers to the parameters
        self.model = self.view = self.graphs = None


def input_device(model: Any) -> torch.device:
    embeddings = model.get_input_embeddings()
    for parameter in embeddings.parameters() if embeddings is not None else ():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device(model.device)


def _are_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits differ by at most ``_MOST_APART`` of the expected norm; NaN counts as 0."""
    found, expected = found.nan_to_num(), expected.nan_to_num()
    return bool((found - expected).norm() <= _MOST_APART * expected.norm())
