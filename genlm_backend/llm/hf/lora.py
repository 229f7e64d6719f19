"""Adapters: the LoRA adapters of one model, of which one at a time is active."""

from __future__ import annotations

import importlib.util
from typing import Any

from genlm_backend.errors import AdapterError, MissingExtraError, UnknownAdapterError


class Adapters:
    """Adapters that transformers injects into a model, by name. Used on the worker thread only.

    Until the first is loaded, the model is left as it came.

    Args:
        model: A model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model: Any = model
        self._names: set[str] = set()
        self._active: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Those that are loaded."""
        return frozenset(self._names)

    def load(self, path: str, name: str) -> None:
        """Load an adapter in PEFT's format.

        Raises:
            MissingExtraError: (``ImportError``) Without PEFT.
            AdapterError: If it cannot be loaded.
        """
        if importlib.util.find_spec("peft") is None:
            raise MissingExtraError("LoRA adapters need PEFT: pip install 'genlm-backend[lora]'")
        if name in self._names:
            raise AdapterError(f"there is an adapter named {name!r} already; see remove_lora()")
        try:
            self._model.load_adapter(path, adapter_name=name)
        except (OSError, ValueError, RuntimeError, TypeError) as error:
            self._restore()
            raise AdapterError(f"no adapter could be loaded from {path!r}: {error}") from error
        self._names.add(name)
        self._activate(name)

    def remove(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            UnknownAdapterError: If there is none of that name.
        """
        self.check(name)
        self._activate(None)
        self._model.delete_adapter(name)
        self._names.discard(name)

    def check(self, name: str | None) -> None:
        """Raise an ``UnknownAdapterError`` unless ``name`` is loaded or ``None``."""
        if name is not None and name not in self._names:
            known = ", ".join(map(repr, sorted(self._names))) or "none are"
            raise UnknownAdapterError(
                f"no LoRA adapter named {name!r} is loaded ({known}); see add_new_lora()"
            )

    def activate(self, name: str | None) -> None:
        """Let the model compute with one adapter, or with none."""
        if name != self._active:
            self._activate(name)

    def close(self) -> None:
        """Let go of the model."""
        self._model = None
        self._names.clear()

    def _activate(self, name: str | None) -> None:
        if name is None:
            self._model.disable_adapters()
        else:
            self._model.set_adapter(name)
            self._model.enable_adapters()
        self._active = name

    def _restore(self) -> None:
        """Take back what an attempt to load has left behind."""
        there = set(getattr(self._model, "peft_config", None) or {})
        for name in there - self._names:
            self._model.delete_adapter(name)
        if self._names:
            self._activate(None)
