"""ModelSnapshot: the settings that a model's rows depend on, and whether they are as they were."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import torch

from genlm_backend.backends.hf.fingerprint import VOLATILE
from genlm_backend.checks import shown
from genlm_backend.errors import ModelStateError

_NEUTRAL: Final = frozenset(
    {*VOLATILE, "architectures", "pad_token_id", "bos_token_id", "eos_token_id", "problem_type"}
    | {"id2label", "label2id", "output_hidden_states"}
)
"""Keys of a config that change no row, as owners set them."""

_NEUTRAL_PARTS: Final = ("dropout", "pdrop", "initializer", "init_std")
"""Parts of the names of keys that count in training alone."""

_GROWING: Final = re.compile("dynamic|longrope")
"""Kinds of rotary positions whose frequencies the model replaces when its contexts grow."""

_ATTENTION: Final = "_attn_implementation"
"""Beginning of the keys that name a function of attention; passes notice other ones themselves."""


@final
class ModelSnapshot:
    """The placement, the mode and the configuration of a model when it was wrapped.

    Whoever owns the model may have changed them since: keys and values that are kept would not be
    those of the model as it is, and a model in training mode draws at random what it drops.
    """

    def __init__(self, model: Any) -> None:
        self._tensors = [
            (tensors, key, f"{name}.{key}".lstrip("."))
            for name, module in model.named_modules()
            for tensors in (module._parameters, module._buffers)
            for key, tensor in tensors.items()
            if tensor is not None
            and not tensor.is_meta  # as offloaded ones are between passes
            and not (
                key.endswith("inv_freq") and _GROWING.search(str(vars(module).get("rope_type")))
            )
        ]
        self._placements = self._placed()
        self._configs = [(config, _settings(config)) for config in _configs(model)]

    def check(self, model: Any, is_trained: bool) -> None:
        """Check that a model is as it was."""
        if (placements := self._placed()) != self._placements:
            self._check_placed(placements)
        if is_trained:
            raise ModelStateError(
                "the model is in training mode, where its rows are drawn at random: call eval() on "
                "it before it is asked, and clear_cache() where its weights have changed"
            )
        for config, before in self._configs:
            now = vars(config)
            for name, value in before.items():
                if name not in now or (now[name] is not value and now[name] != value):
                    raise ModelStateError(
                        f"the model's config had {name}={shown(value)} when it was wrapped and has "
                        f"{shown(now.get(name))} now: put it back, or wrap the model again"
                    )

    def _placed(self) -> list[tuple[torch.dtype, torch.device] | None]:
        """Return each tensor's dtype and device, ``None`` if it is gone; 300 take 0.07 ms."""
        live = [tensors.get(key) for tensors, key, _ in self._tensors]
        return [None if tensor is None else (tensor.dtype, tensor.device) for tensor in live]

    def _check_placed(self, placements: list[tuple[torch.dtype, torch.device] | None]) -> None:
        for (*_, name), was, now in zip(self._tensors, self._placements, placements, strict=True):
            if was and now and now != was:
                raise ModelStateError(
                    f"{name} was {was[0]} on {was[1]} when the model was wrapped and is {now[0]} "
                    f"on {now[1]} now, which its keys and values are not: put it back, and "
                    "clear_cache() if that has rounded its weights, or wrap it again"
                )


def check_output(config: Any) -> None:
    """Check that a model's config has it return what can be read."""
    if getattr(config, "return_dict", True) is False:
        raise ModelStateError(
            "the model's config has return_dict=False, with which models of transformers do not "
            "find what their own parts return: set it to True"
        )


def _configs(model: Any) -> Iterator[Any]:
    """Return a model's config and, one after another, those that it consists of."""
    waiting = [getattr(model, "config", None)]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "to_diff_dict"):
            yield config
            waiting += [value for value in vars(config).values() if hasattr(value, "to_diff_dict")]


def _settings(config: Any) -> Mapping[str, Any]:
    """Return a copy of what a config says, but for what changes no row and what has its own."""
    return {
        name: copy.deepcopy(value) if isinstance(value, (list, dict)) else value
        for name, value in vars(config).items()
        if name not in _NEUTRAL
        and not name.startswith(_ATTENTION)
        and not any(part in name for part in _NEUTRAL_PARTS)
        and not hasattr(value, "to_diff_dict")
    }
