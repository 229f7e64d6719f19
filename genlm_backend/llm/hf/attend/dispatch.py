"""Dispatch: lets a model of transformers attend in a way of ours for one forward pass.

Most models of transformers call the attention function, and the function that makes their masks,
that are registered under the name in their config. Ours are registered once, under a name of their
own; a config has that name for as long as a pass of ours runs. On a thread that runs none they
hand on to those that the config had before.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME: Final = "genlm_backend"


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


@final
class _Current(threading.local):
    """The attention of the pass that runs on this thread, if one of ours does."""

    attention: Attention | None = None


_current = _Current()
_former: Final[dict[int, str]] = {}
"""Identity of a config → the name that it has while no pass of ours runs."""


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
        before = [(config, config._attn_implementation) for config in self._configs]
        _current.attention = attention
        try:
            for config, name in before:
                if name != NAME and id(config) not in _former:
                    weakref.finalize(config, _former.pop, id(config), None)
                if name != NAME:
                    _former[id(config)] = name
                config._attn_implementation = {"": NAME}  # and not of the configs within it
            yield
        finally:
            for config, name in before:
                config._attn_implementation = {"": name}
            _current.attention = None


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the pass of this thread does, or as the model would without one."""
    name = _former[id(module.config)]
    if name in ALL_ATTENTION_FUNCTIONS:
        function = ALL_ATTENTION_FUNCTIONS[name]
    else:  # each file of transformers has its own
        function = sys.modules[type(module).__module__].eager_attention_forward
    if _current.attention is None:
        return function(module, query, key, value, attention_mask, **options)
    if name == "sdpa":  # which heeds nothing but what it names: no soft caps, no sinks
        named = _parameters(function)
        options = {name: value for name, value in options.items() if name in named}
    return _current.attention.attended(query, key, value, attention_mask, **options), None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _mask(**given: Any) -> torch.Tensor | None:
    """Make a mask as the pass of this thread does, or as the model would without one."""
    attention = _current.attention
    if attention is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[_former[id(given["config"])]](**given)
    if given.get("use_vmap") or given.get("attention_mask") is not None:
        raise NotImplementedError("masks that are not functions of two positions")
    allows, window = given["mask_function"], given.get("local_size")
    # Where it may not be left out, something has been added to the pattern.
    is_bare = given.get("allow_is_causal_skip", True)
    is_causal = allows is causal_mask_function
    return attention.mask(allows, is_causal, window if is_bare else None)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
