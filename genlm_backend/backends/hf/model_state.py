"""ModelSnapshot: the settings that a model's rows depend on, and whether they are as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

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

_ATTENTION: Final = "_attn_implementation"
"""Beginning of the keys that name a function of attention; passes notice other ones themselves."""


@dataclass(frozen=True, slots=True)
class DtypeAndDevice:
    """Dtype and device of a model's parameters; a conversion changes the first with the others.

    Attributes:
        dtype: Data type of the first parameter.
        device: Device that it is on.
    """

    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Return that of a model, or ``None`` if it has no parameters."""
        parameters = getattr(model, "parameters", tuple)()
        return next((cls(p.dtype, p.device) for p in parameters), None)

    def __str__(self) -> str:
        return f"{self.dtype} on {self.device}"


@final
class ModelSnapshot:
    """The placement, the mode and the configuration of a model when it was wrapped.

    Whoever owns the model may have changed them since: keys and values that are kept would not be
    those of the model as it is, and a model in training mode draws at random what it drops.

    Args:
        model: A causal language model of transformers, in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self._placement = DtypeAndDevice.of(model)
        self._configs = [(config, _settings(config)) for config in _configs(model)]

    def check(self, model: Any, is_trained: bool) -> None:
        """Check that a model is as it was.

        Args:
            model: The model.
            is_trained: Whether modules of it have been put into training mode.

        Raises:
            ModelStateError: (``RuntimeError``) If it has been converted, moved, put into training
                mode or configured otherwise.
        """
        if (placement := DtypeAndDevice.of(model)) != self._placement:
            raise ModelStateError(
                f"the model was {self._placement} when it was wrapped and is {placement} now, "
                "which its keys and values are not: put it back, and clear_cache() if that has "
                "rounded its weights, or wrap it again"
            )
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


def check_output(config: Any) -> None:
    """Check that a model's config has it return what can be read.

    Raises:
        ModelStateError: (``RuntimeError``) If it has it return bare tuples.
    """
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
