"""ModelSnapshot: the settings that a model's rows depend on, and a check that none has changed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any, Final, final

import torch
from torch import nn

from genlm_backend.backends.hf.lora import adapters_of, layers_of_peft, own_layer, own_modules
from genlm_backend.backends.hf.model_view import AS_WRITTEN
from genlm_backend.checks import shown
from genlm_backend.errors import ModelStateError

VOLATILE: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Config keys that are not compared: they change no row, or name the dtype of the tensors."""

_NEUTRAL: Final = frozenset(
    {*VOLATILE, "architectures", "pad_token_id", "bos_token_id", "eos_token_id", "problem_type"}
    | {"id2label", "label2id", "output_hidden_states"}
)
"""Config keys that are not compared with the snapshot, because setting them changes no row."""

_NEUTRAL_PARTS: Final = ("dropout", "pdrop", "initializer", "init_std")
"""Parts of the names of config keys that matter only in training."""

_GROWING: Final = re.compile("dynamic|longrope")
"""Matches each ``rope_type`` with which a model replaces rotary frequencies as contexts grow."""

_ATTENTION: Final = "_attn_implementation"
"""Prefix of config keys that are not compared: they name attention functions."""

_PARTS: Final = ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
"""Attributes of a module that are dictionaries; their entries are compared."""


@final
class ModelSnapshot:
    """A model as it was when it was wrapped: modules, tensors, mode, adapters and configs."""

    # Views share the model's tensors, copy its hooks anew when they change, and keep the adapters
    # that it had when wrapped. No other change reaches a view, so ``check_settings`` has to raise.
    def __init__(self, model: Any, *, is_apart: bool) -> None:
        self._model, self._is_apart = model, is_apart
        layers = layers_of_peft(model)
        active = {n for one in layers if not one.disable_adapters for n in one.active_adapters}
        self._adapters = {n: c for n, c in adapters_of(model).items() if n in active}
        self._modules = own_modules(model)
        self._tensors = [
            (tensors, key, f"{name}.{key}".lstrip("."))
            for name, module in model.named_modules()
            for tensors in (module._parameters, module._buffers)
            for key, tensor in tensors.items()
            if (module in self._modules or not active.isdisjoint(f"{name}.{key}".split(".")))
            # Tensors on "meta" are not compared: offloaded ones are there only between passes.
            and (tensors is module._parameters if tensor is None else not tensor.is_meta)
            and not (
                key.endswith("inv_freq") and _GROWING.search(str(vars(module).get("rope_type")))
            )
        ]
        self._placements = self._placed()
        self._configs = [(*one, _settings(one[1])) for one in _configs(model)]
        self._look()
        self._before = self._described()

    def check_settings(self) -> bool:
        """Raise ``ModelStateError`` if a setting changed; return whether other attributes did."""
        # This runs before every batch, so it has to be fast. Comparing whole lists takes 0.2 ms for
        # 400 modules, because Python takes identical objects for equal.
        if (
            [*map(type, self._looked_at)] == self._kinds
            and _are_same(self._live, self._seen)
            and self._placed() == self._placements
            and all(map(_has_settings, self._configs))
        ):
            return False
        self._look()  # first: if another thread changes the model meanwhile, the next check sees it
        now = self._described()
        for what, before in self._before.items():
            if not _is_same(before, now.get(what)):
                is_shown = isinstance(before, (str, int, float, list, dict))
                change = f" from {shown(before)} to {shown(now.get(what))}" if is_shown else ""
                self._seen = []
                raise ModelStateError(
                    f"the model has changed since it was wrapped ({what}{change}): undo that "
                    "(call eval() after training) and call clear_cache() if weights have changed, "
                    "or wrap the model again"
                )
        return True

    def _look(self) -> None:
        """Record the modules and their types; copy attributes, ``_PARTS``, merged adapters."""
        self._looked_at = [*self._model.modules()]
        self._kinds = [*map(type, self._looked_at)]
        self._live = [vars(module) for module in self._looked_at]
        self._live += [vars(module)[name] for module in self._looked_at for name in _PARTS]
        self._live += [layer.merged_adapters for layer in layers_of_peft(self._model)]
        self._seen = [values.copy() for values in self._live]

    def _described(self) -> dict[str, Any]:
        """Return the settings and tensors that rows depend on, by name."""
        found: dict[str, Any] = {}
        for module, name in self._modules.items():
            own, of = vars(module), f" of {name or 'the model'}"
            found["training mode" + of] = own.get("training")
            found["class" + of] = type(module)
            found["forward" + of] = _code(module)
            found["config" + of] = own.get("config")
            found["layers" + of] = tuple(
                (n, own_layer(c) if self._is_apart else c) for n, c in module._modules.items()
            )
        for (tensors, key, name), placement in zip(self._tensors, self._placed(), strict=True):
            found["dtype and device of " + name] = " on ".join(map(str, placement or ()))
            found["tensor " + name] = tensors.get(key)
        for name, config, _ in self._configs:
            found |= {f"{name}.{key}": value for key, value in _settings(config).items()}
        layers, adapters = layers_of_peft(self._model), adapters_of(self._model)
        for name in self._adapters:  # an adapter that is added again has other modules
            own = [m for path, m in self._model.named_modules() if name in path.split(".")]
            found[f"adapter {name}"] = (id(adapters.get(name)), *own)
        found["merged adapters"] = sorted({n for layer in layers for n in layer.merged_adapters})
        if not self._is_apart:
            found["adapters"] = [(one.active_adapters, one.disable_adapters) for one in layers]
        return found

    def _placed(self) -> list[tuple[torch.dtype, torch.device] | None]:
        """Return for each recorded tensor its dtype and device, or ``None`` if it was removed."""
        live = [tensors.get(key) for tensors, key, _ in self._tensors]
        return [None if tensor is None else (tensor.dtype, tensor.device) for tensor in live]


def _are_same(now: object, before: object) -> bool:
    try:
        return now == before
    except (RuntimeError, ValueError):  # from comparing tensors or arrays
        return False


def _has_settings(one: tuple[str, Any, Mapping[str, Any]]) -> bool:
    _, config, before = one
    now = vars(config)
    return all(n in now and (now[n] is v or now[n] == v) for n, v in before.items())


def _is_same(before: Any, now: Any) -> bool:
    """Whether a setting is unchanged; a buffer may change shape, or be replaced by an equal one."""
    if isinstance(before, torch.Tensor) and not isinstance(before, nn.Parameter):
        return now is not None and (before.shape != now.shape or torch.equal(before, now))
    return before is now or (not isinstance(before, torch.Tensor) and before == now)


def _code(module: Any) -> Any:
    """Return the ``forward`` set on a module, uncompiled; ``None`` if the class's own is used."""
    forward = vars(module).get("forward")
    forward = getattr(forward, AS_WRITTEN, forward)
    return None if forward == MethodType(type(module).forward, module) else forward


def _configs(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's config and the configs nested in it, each with its name."""
    waiting = [("config", getattr(model, "config", None))]
    while waiting:
        name, config = waiting.pop()
        if hasattr(config, "to_diff_dict"):
            yield name, config
            waiting += [(f"{name}.{key}", value) for key, value in vars(config).items()]


def _settings(config: Any) -> Mapping[str, Any]:
    """Return a config's own entries to compare, with lists and dictionaries copied."""
    return {
        name: copy.deepcopy(value) if isinstance(value, (list, dict)) else value
        for name, value in vars(config).items()
        if name not in _NEUTRAL
        and not name.startswith(_ATTENTION)
        and not any(part in name for part in _NEUTRAL_PARTS)
        and not hasattr(value, "to_diff_dict")
    }
