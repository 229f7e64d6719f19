"""Adapters: a twin of a model for each, with the layers that PEFT makes in their places."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Collection
from typing import Any, final

import torch

from genlm_backend.backends.hf.injection import Saved, base_of, put_layers, read
from genlm_backend.backends.hf.model_state import ModelSnapshot
from genlm_backend.backends.hf.packed_weights import PackedWeights
from genlm_backend.backends.hf.twin import Twin, twin_of
from genlm_backend.backends.loading import check_reachable
from genlm_backend.errors import AdapterError, MissingExtraError, UnknownAdapterError
from genlm_backend.model.query import Adapter


@final
class Adapters:
    """Adapters in PEFT's format over one model: a twin of it for each, and one as the model came.

    PEFT puts an adapter's layers into a twin, so that adapters know nothing of each other and the
    model of none. The adapters of the model's owner, of whom this class is told nothing, are in
    the twin of no adapter what they were when the model came, and are taken out of the others.

    Args:
        model: A model of transformers, or PEFT's wrapper of one.

    Attributes:
        packed: Packed weights of its layers, with which the twins' compute.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._state, self.packed = model, ModelSnapshot(model), PackedWeights()
        self._twins: dict[Adapter | None, Twin] = {None: Twin(model, is_apart=False)}
        self._loaded: dict[Adapter, tuple[Saved, bool]] = {}
        self._layers: list[Any] = []
        self._seen: dict[str, Any] = {}
        self._look_at_owner()
        self._own_states = weakref.WeakKeyDictionary(
            {layer: (_state(layer), _merged(layer)) for layer in self._layers}
        )
        active = {name for layer in self._layers for name in _active_adapters(layer)}
        self._own_adapters = {n: c for n, c in self._seen.items() if n in active}

    def try_twins(self, token_ids: torch.Tensor, **options: Any) -> None:
        """Find out which twins the model has; see ``twin_of``."""
        twin = self._twins[None] = twin_of(self._model, token_ids, **options)
        self._dress(twin, None)

    def twin(self, adapter: Adapter | None = None) -> Twin:
        """Return the twin that computes with an adapter, or as the model came, as that is now.

        It is asked for before every batch.

        Raises:
            ModelStateError: (``RuntimeError``) If the model has been converted, moved, put into
                training mode or configured otherwise.
            UnknownAdapterError: If an adapter that the model came with has been removed.
            AdapterError: If the model's owner has merged an adapter into its weights.
        """
        twin = self._twins.get(adapter)
        changed = self._changed(twin)
        self._look_at_owner()
        if adapter is None:
            self._check_as_it_came()
        else:
            self._check_unmerged()
        if twin is None or (changed and twin.has_other_children(changed)):
            twin = self._twins[adapter] = self._made(adapter)
        elif changed:
            twin.refill()
            self._dress(twin, adapter)
        self.packed.check()
        return twin

    def _changed(self, twin: Twin | None) -> Collection[Any]:
        """Check the state of the model; return what has changed since a twin was filled."""
        twin = twin or self._twins[None]
        changed = twin.changed()
        self._state.check(self._model, bool(changed) and twin.is_trained(changed))
        return changed

    def _made(self, adapter: Adapter | None) -> Twin:
        """Make the twin of an adapter, from the model as it is now."""
        if adapter is None:
            twin = self._twins[None].another()
        else:
            twin, (saved, is_cached) = self._bare(), self._loaded[adapter]
            put_layers(saved, twin, self._bare(), is_cached)
        self._dress(twin, adapter)
        return twin

    def _bare(self) -> Twin:
        """Return a twin without the adapters of the model's owner."""
        twin = self._twins[None].another()
        if not twin.copies:
            raise AdapterError(
                f"the parts of this {type(self._model).__name__} refer to each other in ways of "
                "their own, so that nothing can be put in their places"
            )
        for places, name, layer in _own_layers(twin.module):
            places[name] = layer
        return twin

    def _dress(self, twin: Twin, adapter: Adapter | None) -> None:
        """Give a twin what passes need beside its weights."""
        for layer in self._layers if adapter is None else ():
            state, _ = self._own_states.get(layer, (_OFF, []))
            if layer in twin.copies:
                vars(twin.copies[layer]).update(state)
            elif _state(layer) != {**_state(layer), **state}:
                raise AdapterError(
                    "the adapters of the model's owner have been switched, of which this "
                    f"{type(self._model).__name__} has no copy: switch them back"
                )
        self.packed.place(twin.copies)
        twin.pick()

    # ---------------------------------------------------------------- loading

    def load(self, adapter: Adapter, path: str, is_cached: bool) -> None:
        """Load an adapter in PEFT's format, and try it.

        Args:
            adapter: What it will be asked by.
            path: A directory, or a repository on the hub.
            is_cached: Whether contexts begin from cached keys and values.

        Raises:
            MissingExtraError: (``ImportError``) Without PEFT.
            AdapterError: If it cannot be loaded, or does more than to replace layers; the model
                is as it was then.
        """
        if importlib.util.find_spec("peft") is None:
            raise MissingExtraError("LoRA adapters need PEFT: pip install 'genlm-backend[lora]'")
        try:
            check_reachable(path)
            saved = read(path)
        except Exception as error:  # PEFT and what it reads files with raise many kinds
            raise _not_loaded(path, error) from error
        self._changed(None)
        if adapter.name in self._look_at_owner():
            raise AdapterError(
                f"there is an adapter named {adapter.name!r} already, of the model's owner"
            )
        self._check_unmerged()
        self._loaded[adapter] = saved, is_cached
        try:
            self._twins[adapter] = self._made(adapter)
        except Exception as error:
            self.remove(adapter)
            raise _not_loaded(path, error) from error

    def remove(self, adapter: Adapter) -> None:
        """Let go of an adapter's layers."""
        del self._loaded[adapter]
        self._twins.pop(adapter, None)

    def close(self) -> None:
        """Let go of the model."""
        self.packed.clear()
        self._loaded.clear()
        for twin in self._twins.values():
            twin.close()
        self._twins.clear()
        self._model = None
        self._layers = []

    # ---------------------------------------------------------------- the owner's adapters

    def _look_at_owner(self) -> dict[str, Any]:
        """Return the owner's adapters; find their layers where these are others than before."""
        model = base_of(self._model)
        configs = vars(model).get("peft_config") or {}
        if configs.keys() != self._seen.keys() or any(
            self._seen[name] is not config for name, config in configs.items()
        ):
            self._seen = dict(configs)
            self._layers = [layer for layer in model.modules() if _is_of_peft(layer)]
        return self._seen

    def _check_as_it_came(self) -> None:
        for name, config in self._own_adapters.items():
            if self._seen.get(name) is not config:
                raise UnknownAdapterError(
                    f"the adapter {name!r} that the model came with has been deleted or replaced; "
                    "make another AsyncTransformer of the model as it is now"
                )
        for layer in self._layers:
            _, merged = self._own_states.get(layer, (_OFF, []))
            if _merged(layer) != merged:
                raise AdapterError(
                    f"the model's owner has merged or unmerged {_merged(layer) or merged} since "
                    "it came; make another AsyncTransformer of the model as it is now"
                )

    def _check_unmerged(self) -> None:
        for layer in self._layers:
            if _merged(layer):
                raise AdapterError(
                    f"the adapters {_merged(layer)} of the model's owner are merged into its "
                    "weights, so that no other adapter can be used; unmerge them first"
                )


def _not_loaded(path: str, error: Exception) -> AdapterError:
    is_said = isinstance(error, (ValueError, OSError))  # of others, the name says the most
    reason = str(error) if is_said else f"{type(error).__name__}: {error}"
    return AdapterError(f"no adapter could be loaded from {path!r}: {reason}")


_OFF = {"_disable_adapters": True}


def _state(layer: Any) -> dict[str, Any]:
    """Return the state that decides which adapters a layer of PEFT applies."""
    return {key: getattr(layer, key) for key in ("_active_adapter", "_disable_adapters")}


def _merged(layer: Any) -> list[str]:
    return list(layer.merged_adapters)


def _active_adapters(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else layer.active_adapters


def _is_of_peft(layer: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def _own_layers(model: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the places of PEFT's layers, and the model's own that belong there."""

    def own(layer: Any) -> Any:
        while _is_of_peft(layer):
            layer = layer.base_layer if hasattr(layer, "base_layer") else layer.original_module
        return layer

    return [
        (module._modules, name, own(child))
        for module in model.modules()
        for name, child in module._modules.items()
        if _is_of_peft(child)
    ]
