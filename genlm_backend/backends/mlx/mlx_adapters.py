"""MlxAdapters: LoRA and DoRA adapters in mlx-lm's format, one active at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import mlx.core as mx
from mlx.utils import tree_flatten

from genlm_backend.errors import AdapterError
from genlm_backend.queries.query import Adapter

_FILES: Final = ["adapter_config.json", "adapters.safetensors"]


@final
class MlxAdapters:
    """Adapters of one model: for each adapter, the modules that replace modules of the model."""

    def __init__(self, model: Any) -> None:
        self._model: Any = model
        self._modules: dict[Adapter, Mapping[str, Any]] = {}

    def load(self, adapter: Adapter, path: str) -> None:
        """Load an adapter from a directory or a hub repository, and run it on two tokens."""
        from mlx_lm.tuner.utils import load_adapters

        own = dict(self._model.named_modules())
        try:
            folder = _folder(path)
            before = _parameters(self._model)
            load_adapters(self._model, str(folder))
            self._model.eval()
            found = dict(self._model.named_modules())
            _check_whole(path, folder, _parameters(self._model) - before)
            mx.eval(self._model.parameters(), self._model(mx.array([[0, 0]])))
        except AdapterError:
            raise
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise AdapterError(f"the adapter {path!r} cannot be loaded: {error}") from error
        finally:
            changed = _changed(own, dict(self._model.named_modules()))
            self._put({name: own[name] for name in changed})
        self._modules[adapter] = {name: found[name] for name in changed}

    def remove(self, adapter: Adapter) -> None:
        self._modules.pop(adapter, None)

    @contextlib.contextmanager
    def in_place(self, adapter: Adapter | None) -> Iterator[None]:
        """Put an adapter's modules into the model within the block; ``None`` changes nothing."""
        modules = {} if adapter is None else self._modules[adapter]
        present = dict(self._model.named_modules()) if modules else {}
        own = {name: present[name] for name in modules}
        try:
            self._put(modules)
            yield
        finally:
            self._put(own)

    def close(self) -> None:
        """Drop all adapters and the model."""
        self._modules.clear()
        self._model = None

    def _put(self, modules: Mapping[str, Any]) -> None:
        for name, module in modules.items():
            *path, last = name.split(".")
            parent = self._model
            for part in path:
                parent = parent[int(part)] if isinstance(parent, list) else getattr(parent, part)
            if isinstance(parent, list):
                parent[int(last)] = module
            else:
                setattr(parent, last, module)


def _changed(own: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the names of replaced modules, but not of modules inside other replaced ones."""
    changed = {name for name, module in own.items() if found.get(name) is not module}
    return [name for name in changed if not changed.intersection(_around(name))]


def _parameters(model: Any) -> set[str]:
    flat: Any = tree_flatten(model.parameters())
    return {name for name, _ in flat}


def _check_whole(path: str, folder: Path, added: set[str]) -> None:
    """Raise an ``AdapterError`` if the folder lacks weights of parameters in ``added``."""
    weights: Any = mx.load(str(folder / _FILES[1]))
    # Layers of the model that an adapter wraps keep their weights, but under longer names.
    moved = {name for name in added if name.rpartition(".")[0].endswith((".linear", ".embedding"))}
    if lacking := sorted(added - moved - weights.keys()):
        raise AdapterError(
            f"the adapter {path!r} lacks {len(lacking)} of the weights that its settings require: "
            f"{', '.join(lacking[:3])}{', …' if len(lacking) > 3 else ''}"
        )


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _folder(path: str) -> Path:
    """Return the directory of an adapter, fetched from the hub if it is not local."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(path, allow_patterns=_FILES))
        except Exception as error:  # a wrong name or a missing network raises many types
            raise AdapterError(
                f"{path!r} is neither a local directory nor a repository that can be fetched: "
                f"{error}"
            ) from error
    config = json.loads((folder / "adapter_config.json").read_text())
    if "peft_type" in config:
        raise AdapterError(
            f"{path!r} is an adapter of PEFT, but AsyncMlxLM reads mlx-lm's format: make one with "
            "mlx_lm.lora, or load this one with AsyncTransformer"
        )
    if config.get("fine_tune_type") == "full":
        raise AdapterError(f"{path!r} contains a whole model's weights, not an adapter")
    if config.get("fine_tune_type", "lora") not in ("lora", "dora"):
        raise AdapterError(
            f"{path!r} has fine_tune_type={config['fine_tune_type']!r}: mlx-lm supports 'lora' "
            "and 'dora'"
        )
    if lacking := {"num_layers", "lora_parameters"} - config.keys():
        raise AdapterError(f"the adapter_config.json in {path!r} has no {sorted(lacking)}")
    return folder
