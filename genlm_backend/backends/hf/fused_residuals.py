"""Fused norms of a ``ModelView``: torch's ``rms_norm``, or one kernel for residual and norm.

A view copies a model's modules, but not its weights. Most decoder layers compute: norm, attention,
residual, norm, feed-forward layer, residual.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn

logger = logging.getLogger(__name__)

FusedAddRMSNorm: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]
"""Takes two terms, a norm's weight and its epsilon; returns the sum and the normalised sum."""


def _of_cuda() -> FusedAddRMSNorm:
    from genlm_backend.backends.hf.layer_kernels import fused_add_rms_norm

    return fused_add_rms_norm


RESIDUAL_KERNELS: Final[dict[str, Callable[[], FusedAddRMSNorm]]] = {"cuda": _of_cuda}
"""Functions that return the kernel of a device type; on others, no layers are fused."""

_CHILDREN: Final = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def fuse_residuals(copies: Mapping[nn.Module, Any]) -> None:
    """Fuse residuals and norms of layers that pass a trial; call ``fuse_norms`` first."""
    for own in copies.values():
        if not isinstance(own, nn.ModuleList):
            continue
        before: _Layer | None = None
        for layer in own:
            kernel = _kernel_for(layer) if _may_be_plain(layer) else None
            fused = None if kernel is None else _Layer(layer, kernel)
            if fused is not None:
                vars(layer)["forward"] = fused
                if before is not None:
                    before.following = fused
            before = fused


@final
class _Layer:
    """The ``forward`` of a fused layer, with the next layer's first norm if both are fused."""

    def __init__(self, module: Any, kernel: FusedAddRMSNorm) -> None:
        self._module, self._kernel = module, kernel
        self.following: _Layer | None = None
        self._given: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    def __call__(self, hidden_states: torch.Tensor, *others: Any, **options: Any) -> Any:
        module = self._module
        if hidden_states is not self._given:
            self._normed = None
        normed, self._given, self._normed = self._normed, None, None
        first, second = module.input_layernorm, module.post_attention_layernorm
        if others or torch.is_grad_enabled() or hidden_states.dtype is not second.weight.dtype:
            return type(module).forward(module, hidden_states, *others, **options)
        normed = first(hidden_states) if normed is None else normed
        found = _hidden(module.self_attn(hidden_states=normed, **options))
        total, normed = self._added(found, hidden_states, second)
        found = _hidden(module.mlp(normed))
        following = self.following
        if following is None:
            return total + found
        total, normed = self._added(found, total, following._module.input_layernorm)
        following._given, following._normed = total, normed
        return total

    def _added(
        self, given: torch.Tensor, residual: torch.Tensor, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if given.dtype is not residual.dtype or norm.weight.device != residual.device:
            total = given + residual
            return total, norm(total)
        return self._kernel(given, residual, norm.weight, vars(norm)["forward"].eps)


def _hidden(found: Any) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else found[0]


def _may_be_plain(layer: Any) -> bool:
    own = vars(layer)
    if {*own["_modules"]} != _CHILDREN or own["_parameters"] or "forward" in own:
        return False
    # Not with hooks, which may change hidden states in place after their norm has been computed.
    if any(one._forward_hooks or one._forward_pre_hooks for one in (layer, *layer.children())):
        return False
    return all(
        isinstance(vars(norm).get("forward"), Norm) and norm.weight.device.type in RESIDUAL_KERNELS
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    )


@torch.inference_mode()
def _kernel_for(layer: Any) -> FusedAddRMSNorm | None:
    """Return the kernel for a layer; ``None`` if it fails a trial against the layer's code."""
    weight, seen = layer.input_layernorm.weight, list[dict[str, Any]]()
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 1, len(weight), generator=generator, dtype=torch.float32)
    numbers *= torch.tensor([1.0, 30.0, 1000.0])[:, None, None]  # so that a clamp would show
    given = numbers.to(weight.device, weight.dtype)

    def attend(**options: Any) -> tuple[torch.Tensor, None]:
        seen.append(options)
        return 0.5 * options["hidden_states"].roll(1, -1), None

    def feed_forward(states: torch.Tensor) -> torch.Tensor:
        return 0.25 * states.roll(2, -1)

    parts = [vars(layer.self_attn), vars(layer.mlp)]
    before = [part.get("forward") for part in parts]
    try:
        kernel = RESIDUAL_KERNELS[weight.device.type]()
        names = [*inspect.signature(type(layer).forward).parameters.values()][2:]
        options = {one.name: object() for one in names if one.kind is not one.VAR_KEYWORD}
        parts[0]["forward"], parts[1]["forward"] = attend, feed_forward
        expected = type(layer).forward(layer, given, **options)
        found = _Layer(layer, kernel)(given, **options)
        following = _Layer(layer, kernel)
        following.following = following
        again = following(given, **options)
    except Exception as error:  # third-party code may raise anything; a kernel may not compile
        logger.info("%s is not fused: the trial failed", type(layer).__name__, exc_info=error)
        return None
    finally:
        for part, forward in zip(parts, before, strict=True):
            part.pop("forward", None)
            if forward is not None:
                part["forward"] = forward
    are_equal = all(_are_same(one, seen[0]) for one in seen[1:])
    are_close = isinstance(expected, torch.Tensor) and all(
        is_close(one, expected) for one in (found, again)
    )
    return kernel if are_equal and are_close else None


def _are_same(options: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two calls got the same arguments, with hidden states equal up to rounding."""
    given, other = options["hidden_states"], others["hidden_states"]
    return (
        options.keys() == others.keys()
        and is_close(given, other)
        and all(options[name] is others[name] for name in {*options} - {"hidden_states"})
    )


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    rounding = 4 * torch.finfo(expected.dtype).eps
    found, expected = found.float(), expected.float()
    return bool(((found - expected).norm(dim=-1) <= rounding * expected.norm(dim=-1)).all())


def fuse_norms(copies: Mapping[nn.Module, Any]) -> None:
    """Let norms of a view call torch's ``rms_norm`` if that agrees with them on random numbers."""
    for module, own in copies.items():
        eps = _eps_of(module)
        if eps is not None and _is_root_mean_square(module, eps):
            vars(own)["forward"] = Norm(own, eps)


@final
class Norm:
    """The ``forward`` of an RMS norm: torch's ``rms_norm`` with the module's current weight."""

    def __init__(self, module: Any, eps: float) -> None:
        self._module, self.eps = module, eps

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self._module.weight
        if hidden_states.dtype is not weight.dtype:  # which dtype to return depends on the module
            return type(self._module).forward(self._module, hidden_states)
        return nn.functional.rms_norm(hidden_states, weight.shape, weight, self.eps)


def _eps_of(module: nn.Module) -> float | None:
    """Return the epsilon of a norm; ``None`` for a module that cannot be a norm."""
    own = vars(module)
    weight = own["_parameters"].get("weight")
    is_bare = not own["_modules"] and not own["_buffers"] and [*own["_parameters"]] == ["weight"]
    if weight is None or not is_bare or weight.dim() != 1 or "forward" in own:
        return None
    eps = own.get("variance_epsilon", own.get("eps"))
    takes_states_alone = len(inspect.signature(module.forward).parameters) == 1  # no gate
    return eps if isinstance(eps, float) and takes_states_alone else None


@torch.inference_mode()
def _is_root_mean_square(module: Any, eps: float) -> bool:
    """Whether a module and torch's ``rms_norm`` agree on random numbers."""
    weight = module.weight
    if weight.device.type == "meta" or not weight.is_floating_point() or not weight.any():
        return False
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, len(weight), generator=generator, dtype=torch.float32)
    numbers[1] += 3  # a layer norm would subtract this mean
    numbers[2] *= eps**0.5  # so small that epsilon changes the result
    numbers[3] *= 30
    given = numbers.to(weight.device, weight.dtype)
    try:
        found = type(module).forward(module, given)  # without the owner's hooks
    except Exception:  # third-party code with other arguments
        return False
    expected = nn.functional.rms_norm(given, weight.shape, weight, eps)
    if not isinstance(found, torch.Tensor) or found.dtype is not expected.dtype:
        return False
    rounding = 4 * torch.finfo(weight.dtype).eps
    return torch.allclose(found.float(), expected.float(), rtol=rounding, atol=rounding)
