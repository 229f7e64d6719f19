"""Adapters: the LoRA adapters of one model, of which one at a time is active."""

from __future__ import annotations

import importlib.util
from typing import Any

from genlm_backend.errors import AdapterError, MissingExtraError, UnknownAdapterError
from genlm_backend.llm.base import UNKNOWN_ADAPTER


class Adapters:
    """Adapters that transformers injects into a model, by name.

    Until the first is loaded, the model is left as it came; without a name, it computes as it
    came afterwards too, with the adapters that its owner had activated. Used on the worker
    thread only, but for ``check``.

    Args:
        model: A model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model: Any = model
        self._names: frozenset[str] = frozenset()  # replaced whole, since any thread reads it
        self._active: str | None = None
        self._own = _active_adapters(model)

    def load(self, path: str, name: str) -> None:
        """Load an adapter in PEFT's format.

        Raises:
            MissingExtraError: (``ImportError``) Without PEFT.
            AdapterError: If it cannot be loaded.
        """
        if importlib.util.find_spec("peft") is None:
            raise MissingExtraError("LoRA adapters need PEFT: pip install 'genlm-backend[lora]'")
        before = self._injected()
        if name in before:
            raise AdapterError(f"there is an adapter named {name!r} already; see remove_lora()")
        try:
            self._model.load_adapter(path, adapter_name=name)
            self._activate(name)
        except Exception as error:  # PEFT and what it reads files with raise many kinds
            for left_behind in self._injected() - before:
                self._model.delete_adapter(left_behind)
            if before:
                self._activate(None)
            raise AdapterError(f"no adapter could be loaded from {path!r}: {error}") from error
        self._names |= {name}

    def remove(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            UnknownAdapterError: If there is none of that name.
        """
        self.check(name)
        self._names -= {name}
        self._activate(None)
        self._model.delete_adapter(name)

    def check(self, name: str | None) -> None:
        """Raise an ``UnknownAdapterError`` unless ``name`` is loaded or ``None``; any thread."""
        if name is not None and name not in self._names:
            known = ", ".join(map(repr, sorted(self._names))) or "none are"
            raise UnknownAdapterError(
                f"{UNKNOWN_ADAPTER.format(name)} ({known}); see add_new_lora()"
            )

    def activate(self, name: str | None) -> None:
        """Let the model compute with one adapter, or as it came.

        Raises:
            UnknownAdapterError: If there is none of that name.
        """
        if name != self._active:
            self.check(name)
            self._activate(name)

    def close(self) -> None:
        """Let go of the model."""
        self._model = None
        self._names = frozenset()

    def _injected(self) -> set[str]:
        """Return the names of all adapters that the model has, its owner's among them."""
        return set(getattr(self._model, "peft_config", None) or {})

    def _activate(self, name: str | None) -> None:
        if names := [name] if name is not None else self._own:
            self._model.set_adapter(names)
            self._model.enable_adapters()
        elif self._injected():
            self._model.disable_adapters()
        self._active = name


def _active_adapters(model: Any) -> list[str]:
    """Return the names of the adapters that a model computes with."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return []
    # Where they are switched off, transformers names the active ones all the same.
    is_off = any(getattr(layer, "disable_adapters", None) is True for layer in model.modules())
    return [] if is_off else list(model.active_adapters())
