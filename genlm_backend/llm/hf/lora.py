"""Adapters: layers that PEFT makes of a model's, in their places only while they are asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, final

from genlm_backend.errors import AdapterError, MissingExtraError, UnknownAdapterError
from genlm_backend.llm.hf.injection import Entry, assigned, layers_of, read
from genlm_backend.llm.loading import check_reachable
from genlm_backend.llm.query import Adapter


@final
class _ModelLocks:
    """One lock for each model, which all who use the model share."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget all locks, which threads of a parent process may hold; for a fork of it."""
        self._locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
        self._making = threading.Lock()

    def of(self, model: Any) -> threading.RLock:
        """Return the lock of a model."""
        with self._making:
            return self._locks.setdefault(model, threading.RLock())


_locks = _ModelLocks()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.renew)


@final
class Adapters:
    """Adapters in PEFT's format over one model, and the state in which the model came.

    An adapter's layers are made from the model's own, taken out again, and kept here. They are
    put into their places for as long as something is computed with them, so that adapters know
    nothing of each other, and that between two batches the model is as its owner left it. The
    adapters of the owner, of whom this class is told nothing, are switched for as long to what
    they were when the model came, or off for an adapter that was loaded here.

    Everything happens under a lock that all users of one model share.

    Args:
        model: A model of transformers, or PEFT's wrapper of one.
    """

    def __init__(self, model: Any) -> None:
        self._model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._lock = _locks.of(self._model)
        self._loaded: dict[Adapter, list[Entry]] = {}
        self._layers: list[Any] = []
        self._seen: dict[str, Any] = {}
        with self._lock:
            self._look_at_owner()
            self._own_states = weakref.WeakKeyDictionary(
                {layer: (_state(layer), _merged(layer)) for layer in self._layers}
            )
            active = {name for layer in self._layers for name in _active_adapters(layer)}
            self._own_adapters = {n: c for n, c in self._seen.items() if n in active}

    @contextlib.contextmanager
    def in_place(self, adapter: Adapter | None = None) -> Iterator[None]:
        """Let the model compute with an adapter, or as it came; afterwards as before.

        Raises:
            UnknownAdapterError: If an adapter that the model came with has been removed.
            AdapterError: If the model's owner has merged an adapter into its weights.
        """
        with self._lock:
            if adapter is None:
                entries = self._as_it_came()
            else:
                entries = self._owner_off() + self._loaded[adapter]
            with assigned(entries):
                yield

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
        with self._lock:
            if adapter.name in self._look_at_owner():
                raise AdapterError(
                    f"there is an adapter named {adapter.name!r} already, of the model's owner"
                )
            self._owner_off()  # raises where something is merged
            try:
                with assigned(_without_adapters(self._model)):
                    entries = layers_of(saved, self._model, is_cached)
            except Exception as error:
                raise _not_loaded(path, error) from error
            self._loaded[adapter] = entries

    def remove(self, adapter: Adapter) -> None:
        """Let go of an adapter's layers."""
        with self._lock:
            del self._loaded[adapter]

    def close(self) -> None:
        """Let go of the model."""
        self._loaded.clear()
        self._model, self._layers = None, []

    # ---------------------------------------------------------------- the owner's adapters

    def _look_at_owner(self) -> dict[str, Any]:
        """Return the owner's adapters; find their layers where these are others than before."""
        configs = vars(self._model).get("peft_config") or {}
        if configs.keys() != self._seen.keys() or any(
            self._seen[name] is not config for name, config in configs.items()
        ):
            self._seen = dict(configs)
            self._layers = [layer for layer in self._model.modules() if _is_of_peft(layer)]
            for layer in self._layers:  # some have it of their class
                vars(layer).update(_state(layer))
        return self._seen

    def _as_it_came(self) -> list[Entry]:
        configs = self._look_at_owner()
        for name, config in self._own_adapters.items():
            if configs.get(name) is not config:
                raise UnknownAdapterError(
                    f"the adapter {name!r} that the model came with has been deleted or replaced; "
                    "make another AsyncTransformer of the model as it is now"
                )
        entries: list[Entry] = []
        for layer in self._layers:
            state, merged = self._own_states.get(layer, (_OFF, []))
            if _merged(layer) != merged:
                raise AdapterError(
                    f"the model's owner has merged or unmerged {_merged(layer) or merged} since "
                    "it came; make another AsyncTransformer of the model as it is now"
                )
            entries += [(vars(layer), key, value) for key, value in state.items()]
        return entries

    def _owner_off(self) -> list[Entry]:
        self._look_at_owner()
        for layer in self._layers:
            if _merged(layer):
                raise AdapterError(
                    f"the adapters {_merged(layer)} of the model's owner are merged into its "
                    "weights, so that no other adapter can be used; unmerge them first"
                )
        return [(vars(layer), key, value) for layer in self._layers for key, value in _OFF.items()]


def _not_loaded(path: str, error: Exception) -> AdapterError:
    is_said = isinstance(error, (ValueError, OSError))  # of others, the name says the most
    reason = str(error) if is_said else f"{type(error).__name__}: {error}"
    return AdapterError(f"no adapter could be loaded from {path!r}: {reason}")


_OFF = {"_disable_adapters": True}


def _state(layer: Any) -> dict[str, Any]:
    """Return what decides which adapters a layer of PEFT applies."""
    return {key: getattr(layer, key) for key in ("_active_adapter", "_disable_adapters")}


def _merged(layer: Any) -> list[str]:
    return list(layer.merged_adapters)


def _active_adapters(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else layer.active_adapters


def _is_of_peft(layer: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def _without_adapters(model: Any) -> list[Entry]:
    """Return the entries that put the model's own layers into the places of PEFT's."""

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
