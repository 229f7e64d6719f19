"""Adapters in PEFT's format: those of a model's owner, and the reading of others."""

from __future__ import annotations

import importlib.util
import weakref
from typing import Any, final

from genlm_backend.backends.hf.injection import Saved, base_of, read
from genlm_backend.backends.hf.twin import Twin
from genlm_backend.backends.loading import check_reachable
from genlm_backend.errors import AdapterError, MissingExtraError, UnknownAdapterError


def read_adapter(path: str) -> Saved:
    """Read an adapter from a directory, or from a repository on the hub."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("LoRA adapters need PEFT: pip install 'genlm-backend[lora]'")
    try:
        check_reachable(path)
        return read(path)
    except Exception as error:  # PEFT and what it reads files with raise many kinds
        raise not_loaded(path, error) from error


def not_loaded(path: str, error: Exception) -> AdapterError:
    """Return the error of an adapter that cannot be loaded, given why."""
    is_said = isinstance(error, (ValueError, OSError))  # of others, the name says the most
    reason = str(error) if is_said else f"{type(error).__name__}: {error}"
    return AdapterError(f"no adapter could be loaded from {path!r}: {reason}")


@final
class OwnerAdapters:
    """The adapters that a model's owner has put into it, of which this library is told nothing.

    In the twin of no adapter they are what they were when the model came, and they are taken out of
    the others.
    """

    def __init__(self, model: Any) -> None:
        self._name: str = type(model).__name__
        self._base: Any = base_of(model)
        self._layers: list[Any] = []
        self._seen: dict[str, Any] = {}
        self.look()
        self._own_states = weakref.WeakKeyDictionary(
            {layer: (_state(layer), _merged(layer)) for layer in self._layers}
        )
        active = {name for layer in self._layers for name in _active_adapters(layer)}
        self._own_adapters = {n: c for n, c in self._seen.items() if n in active}

    def look(self) -> dict[str, Any]:
        """Return the adapters; find their layers where these are others than before."""
        configs = vars(self._base).get("peft_config") or {}
        if configs.keys() != self._seen.keys() or any(
            self._seen[name] is not config for name, config in configs.items()
        ):
            self._seen = dict(configs)
            self._layers = [layer for layer in self._base.modules() if _is_of_peft(layer)]
        return self._seen

    def check_as_it_came(self) -> None:
        """Check that the model computes with the adapters that it came with."""
        self.look()
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

    def check_unmerged(self) -> None:
        """Check that no adapter is merged into the weights."""
        self.look()
        for layer in self._layers:
            if _merged(layer):
                raise AdapterError(
                    f"the adapters {_merged(layer)} of the model's owner are merged into its "
                    "weights, so that no other adapter can be used; unmerge them first"
                )

    def dress(self, twin: Twin) -> None:
        """Have the layers of a twin apply the adapters that they applied when the model came."""
        for layer in self._layers:
            state, _ = self._own_states.get(layer, (_OFF, []))
            if layer in twin.copies:
                vars(twin.copies[layer]).update(state)
            elif _state(layer) != {**_state(layer), **state}:
                raise AdapterError(
                    "the adapters of the model's owner have been switched, of which this "
                    f"{self._name} has no copy: switch them back"
                )

    def close(self) -> None:
        """Let go of the model."""
        self._base, self._layers, self._seen = None, [], {}

    def take_out(self, twin: Twin) -> None:
        """Put the model's own layers into the places of PEFT's in a twin."""
        if not twin.copies:
            raise AdapterError(
                f"the parts of this {self._name} refer to each other in ways of their own, so that "
                "nothing can be put in their places"
            )
        for places, name, layer in _own_layers(twin.module):
            places[name] = layer


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
