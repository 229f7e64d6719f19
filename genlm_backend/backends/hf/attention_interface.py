"""Attention functions registered with transformers, which call the current pass's attention.

Most models of transformers call the attention and mask functions that are registered under the
name in their config. For each such name, our functions are registered once, under another name
that the configs of a ``ModelView``, a copy of the model, may have. Outside ``dispatched_to``, our
functions call those that they replace.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from genlm_backend.attention.cascade_run import CascadeRun, new_positions
from genlm_backend.attention.torch.torch_ops import TORCH
from genlm_backend.errors import ModelStateError

if TYPE_CHECKING:
    from genlm_backend.backends.hf.cuda_graph_run import CudaGraphRun

PREFIX: Final = "genlm_backend-"


def attends_otherwise(how: str) -> ModelStateError:
    """Return the error for a model that attends in a way that its probe did not show."""
    return ModelStateError(
        f"the model attends otherwise than when it was wrapped: {how}; was it changed, or was its "
        "attn_implementation set during a query?"
    )


_HARMLESS: Final = frozenset(
    {
        "dropout",  # zero in evaluation mode
        "is_causal",  # ``False`` is refused
        "sliding_window",  # the mask contains the window too
        "cache_position",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Options that transformers passes to attention functions and that our functions may ignore."""


@final
class TorchCascadeRun(CascadeRun[Tensor]):
    """Cascade attention of one forward pass, called by the layers of a transformers model."""

    ops = TORCH
    attends_otherwise = staticmethod(attends_otherwise)

    def mask(
        self, allows: Callable[..., Tensor], is_causal: bool, window: int | None
    ) -> Tensor | None:
        """Return the mask that layers of one kind pass to ``attend``; ``None`` for a causal one."""
        num_rows, num_new = self._batch.input_ids.shape
        length = self.max_prefix_len + num_new
        if is_causal or (window is not None and window >= length):
            return None
        allowed = allows(
            torch.arange(num_rows, dtype=torch.int64)[:, None, None, None],
            torch.zeros(1, 1, 1, 1, dtype=torch.int64),
            new_positions(self._batch)[:, None, :, None],
            torch.arange(length, dtype=torch.int64)[None, None, None, :],
        ).expand(num_rows, 1, num_new, length)
        self._allowed[id(allowed)] = allowed, allowed
        return allowed


@final
class _Current(threading.local):
    """The attention of the pass on this thread; ``None`` if no pass uses our functions."""

    attention: TorchCascadeRun | CudaGraphRun | None = None


_current = _Current()


@contextlib.contextmanager
def dispatched_to(attention: TorchCascadeRun | CudaGraphRun) -> Iterator[None]:
    """Let our functions call ``attention`` when layers call them on this thread."""
    _current.attention = attention
    try:
        yield
    finally:
        _current.attention = None


def name_attention(config: Any, is_ours: bool) -> None:
    """Let a config that names attention functions name ours if ``is_ours``, else the originals."""
    name = getattr(config, "_attn_implementation", None)
    if isinstance(name, str):
        own = name.removeprefix(PREFIX)
        wanted = _name_of(own) if is_ours else own
        if wanted != name:
            config._attn_implementation = {"": wanted}  # ``""``: without nested configs


@functools.cache
def _name_of(former: str) -> str:
    """Register our functions that replace those named ``former``; return the name of ours."""
    name = PREFIX + former
    AttentionInterface.register(name, functools.partial(_attention, former))
    AttentionMaskInterface.register(name, functools.partial(_mask, former))
    return name


def _attention(
    former: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call this thread's current attention or, if it has none, the model's own function."""
    if former in ALL_ATTENTION_FUNCTIONS:
        function = ALL_ATTENTION_FUNCTIONS[former]
    else:  # each modeling file has its own eager function
        function = sys.modules[type(module).__module__].eager_attention_forward
    attention = _current.attention
    if attention is None:
        return function(module, query, key, value, attention_mask, **options)
    if former == "sdpa":  # it ignores options outside its signature: soft caps, sinks
        known = _parameters(function)
        options = {name: value for name, value in options.items() if name in known}
    named = [options.pop(name, None) for name in ("scaling", "softcap", "s_aux")]
    scale: float = query.shape[-1] ** -0.5 if named[0] is None else named[0]
    unknown = sorted(name for name in options.keys() - _HARMLESS if options[name] is not None)
    if unknown or options.get("is_causal") is False:
        raise attention.attends_otherwise(f"a layer passes {unknown or 'is_causal=False'}")
    found = attention.attend(query, key, value, attention_mask, scale, *named[1:])
    return found.transpose(1, 2).contiguous(), None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _mask(former: str, **given: Any) -> Tensor | None:
    """Return the mask of this thread's current attention or, if it has none, the model's own."""
    attention = _current.attention
    if attention is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[former](**given)
    if given.get("use_vmap") or given.get("attention_mask") is not None:
        raise attends_otherwise("a mask is not a function of two positions alone")
    allows, window = given["mask_function"], given.get("local_size")
    # If the mask may not be skipped, something was added to the causal or windowed pattern.
    is_bare = given.get("allow_is_causal_skip", True)
    is_causal = allows is causal_mask_function
    allows = functools.partial(_allowed, allows, given.get("device"))
    return attention.mask(allows, is_causal, window if is_bare else None)


def _allowed(allows: Callable[..., Tensor], device: Any, *positions: Tensor) -> Tensor:
    """Call a model's mask function with positions on the CPU or, if that fails, on ``device``."""
    try:
        return allows(*positions)
    except RuntimeError:
        if device is None or torch.device(device).type == "cpu":
            raise
        # A function that uses tensors of the model needs positions on their device.
        return allows(*(position.to(device) for position in positions)).cpu()
