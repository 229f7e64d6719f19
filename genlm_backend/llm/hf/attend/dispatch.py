"""Dispatch: lets a model of transformers attend in a way of ours for one forward pass.

Most models of transformers call the attention function, and the function that makes their masks,
that are registered under the name in their config. Ours are registered once for each function that
a config may name, and a config has their name for as long as a pass of ours runs. On a thread that
runs none they hand on to that function, and so they do in a copy of the config that was made
meanwhile.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

import torch
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from genlm_backend.errors import ModelStateError

PREFIX: Final = "genlm_backend-"


class Attention(abc.ABC):
    """What computes the attention of one forward pass, layer by layer."""

    @abc.abstractmethod
    def attended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """Return what the new tokens attend to: ``[B, Q, heads, value_dim]``.

        Args:
            query: Queries of the new tokens: ``[B, heads, Q, dim]``.
            keys: Their keys: ``[B, key_heads, Q, dim]``.
            values: Their values: ``[B, key_heads, Q, value_dim]``.
            mask: What ``mask`` has returned for layers of this kind.
            options: Whatever else the model passes to its attention functions.
        """

    @abc.abstractmethod
    def mask(
        self, allows: Callable[..., torch.Tensor], is_causal: bool, window: int | None
    ) -> torch.Tensor | None:
        """Return what the layers of one kind pass to ``attended``.

        Args:
            allows: Whether a token may attend to another one, given the numbers of row and head
                and both positions in the context.
            is_causal: Whether that means all tokens before it, and itself.
            window: How many tokens it allows at most, if that is all beside causality.
        """


def attends_otherwise(how: str) -> ModelStateError:
    """Return the error of a model that attends in a way that ours cannot stand for.

    A model that always does is found out before it is asked anything.
    """
    return ModelStateError(
        f"the model attends otherwise than it did when it was wrapped: {how}; has it been changed, "
        "or has its attn_implementation been set while it was asked?"
    )


@final
class _Current(threading.local):
    """The attention of the pass that runs on this thread, if one of ours does."""

    attention: Attention | None = None

    def clear(self) -> None:
        """Note that none of ours runs."""
        self.attention = None


_current = _Current()


class _Borrowed(NamedTuple):
    """A config that passes of ours run with.

    Attributes:
        config: The config.
        num_passes: How many run now.
    """

    config: Any
    num_passes: int


@final
class _Configs:
    """The configs that passes of ours run with, on whatever threads and for whatever models."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget all of them, and the lock, which a thread of a parent process may hold."""
        self._lock = threading.Lock()
        self._borrowed: dict[int, _Borrowed] = {}

    def borrow(self, config: Any) -> None:
        """Have a config name our functions until it is given back as often."""
        with self._lock:
            name = config._attn_implementation
            ours = _name_of(name.removeprefix(PREFIX))
            num_passes = self._borrowed.get(id(config), _Borrowed(config, 0)).num_passes
            self._borrowed[id(config)] = _Borrowed(config, num_passes + 1)
            if name != ours:
                config._attn_implementation = {"": ours}  # and not of the configs within it

    def give_back(self, config: Any) -> None:
        """Have a config name the model's own functions again after the last pass."""
        with self._lock:
            num_passes = self._borrowed[id(config)].num_passes - 1
            if num_passes:
                self._borrowed[id(config)] = _Borrowed(config, num_passes)
                return
            del self._borrowed[id(config)]
            name = config._attn_implementation
            if name.startswith(PREFIX):  # or its owner has chosen another one meanwhile
                config._attn_implementation = {"": name.removeprefix(PREFIX)}


_configs = _Configs()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_configs.renew)


@final
class Dispatch:
    """The configs by which the layers of one model choose their attention functions.

    Args:
        model: A model of transformers.
    """

    def __init__(self, model: Any) -> None:
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None))}
        self._configs = [
            config
            for config in configs.values()
            if isinstance(getattr(config, "_attn_implementation", None), str)
        ]

    @contextlib.contextmanager
    def to(self, attention: Attention) -> Iterator[None]:
        """Have the model's layers call an attention, on this thread."""
        with contextlib.ExitStack() as stack:
            for config in self._configs:
                _configs.borrow(config)
                stack.callback(_configs.give_back, config)
            _current.attention = attention
            stack.callback(_current.clear)
            yield


@functools.cache
def _name_of(former: str) -> str:
    """Register our functions in the place of those of a name; return what they are called."""
    name = PREFIX + former
    AttentionInterface.register(name, functools.partial(_attention, former))
    AttentionMaskInterface.register(name, functools.partial(_mask, former))
    return name


def _attention(
    former: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the pass of this thread does, or as the model would without one."""
    if former in ALL_ATTENTION_FUNCTIONS:
        function = ALL_ATTENTION_FUNCTIONS[former]
    else:  # each file of transformers has its own
        function = sys.modules[type(module).__module__].eager_attention_forward
    if _current.attention is None:
        return function(module, query, key, value, attention_mask, **options)
    if former == "sdpa":  # which heeds nothing but what it names: no soft caps, no sinks
        named = _parameters(function)
        options = {name: value for name, value in options.items() if name in named}
    return _current.attention.attended(query, key, value, attention_mask, **options), None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _mask(former: str, **given: Any) -> torch.Tensor | None:
    """Make a mask as the pass of this thread does, or as the model would without one."""
    attention = _current.attention
    if attention is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[former](**given)
    if given.get("use_vmap") or given.get("attention_mask") is not None:
        raise attends_otherwise("with masks that are not functions of two positions")
    allows, window = given["mask_function"], given.get("local_size")
    # Where it may not be left out, something has been added to the pattern.
    is_bare = given.get("allow_is_causal_skip", True)
    is_causal = allows is causal_mask_function
    return attention.mask(allows, is_causal, window if is_bare else None)
