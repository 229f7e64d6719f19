"""Merged linear layers of a ``ModelView``: one product for q, k and v, and one for gate and up.

A view copies a model's modules, but not its weights. Merged layers get the same input, so their
weights can be rows of one matrix. The parameters stay the same objects with the same values, but
move into this matrix: none is stored twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.nn import functional

from genlm_backend.backends.hf.fused_residuals import is_close

logger = logging.getLogger(__name__)

SiluAndMul: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps gates and up-projections side by side, ``[..., 2 * width]``, to ``silu(gates) * ups``."""

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj")
_GATED: Final = ("gate_proj", "up_proj")


def _of_cuda() -> SiluAndMul:
    from genlm_backend.backends.hf.layer_kernels import silu_and_mul

    return silu_and_mul


GATE_KERNELS: Final[dict[str, Callable[[], SiluAndMul]]] = {"cuda": _of_cuda}
"""Functions that return the gate kernel of a device type; on others, no layers are merged."""


def merge_linear_layers(copies: Mapping[nn.Module, Any]) -> None:
    """Merge the layers q, k and v, and the layers gate and up, of a view's modules if possible."""
    has_moved = False
    for own in copies.values():
        children = vars(own)["_modules"]
        for names in (_ATTENTION, _GATED):
            layers = [children.get(name) for name in names]
            if not _can_merge(layers):
                continue
            has_moved |= not _are_joined([layer.weight for layer in layers])
            try:
                products = _MergedLinear(layers)
            except torch.OutOfMemoryError:  # the merged copy exists before the originals are freed
                logger.info("not enough memory to merge %s", names)
                continue
            if names is _GATED:
                gate = _silu_and_mul_for(own, products)
                if gate is not None:
                    vars(own)["forward"] = partial(products.gated, own, gate)
                    continue
            for index, layer in enumerate(layers):
                vars(layer)["forward"] = partial(products.of, index)
    if has_moved and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # so that the memory of the unmerged weights counts as free


def _can_merge(layers: Sequence[Any]) -> bool:
    if not all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in layers):
        return False
    if any(map(_has_hooks, layers)):
        return False
    weights, biases = ([getattr(one, name) for one in layers] for name in ("weight", "bias"))
    biases = [bias for bias in biases if bias is not None]
    first, given = weights[0], [*weights, *biases]
    return (
        len(given) in (len(layers), 2 * len(layers))
        and len(set(map(id, given))) == len(given)
        and all(type(one) is nn.Parameter and not one.is_inference() for one in given)
        and all(one.device == first.device and one.dtype is first.dtype for one in given)
        and all(one.layout is torch.strided and one.is_contiguous() for one in given)
        and first.device.type in GATE_KERNELS
        and first.is_floating_point()
        and all(
            _are_joined(own) or all(map(_is_alone, own)) for own in (weights, given[len(layers) :])
        )
        and len({weight.shape[1] for weight in weights}) == 1
        and all(map(torch.numel, given))
    )


def _has_hooks(layer: Any) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _is_alone(parameter: Any) -> bool:
    """Whether a parameter fills its storage, and so is no part of a larger buffer."""
    return parameter.untyped_storage().nbytes() == parameter.nbytes


def _are_joined(parameters: Sequence[Any]) -> bool:
    """Whether each parameter begins where the one before it ends, in the same memory."""
    starts = [parameter.data_ptr() for parameter in parameters]
    ends = accumulate((parameter.nbytes for parameter in parameters), initial=sum(starts[:1]))
    memory = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return len(memory) <= 1 and starts == [*ends][:-1]


@torch.inference_mode(False)
@torch.no_grad()
def _joined(parameters: Sequence[Any]) -> torch.Tensor:
    """Return one tensor of the parameters' rows; move them into it unless they are adjacent."""
    sizes = [len(parameter) for parameter in parameters]
    if not _are_joined(parameters):
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, whole.split(sizes), strict=True):
            parameter.data = part
    first = parameters[0].detach()
    return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())


@final
class _MergedLinear:
    """Linear layers called in order on one input: the first call computes the outputs of all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._weight = _joined([layer.weight for layer in layers])
        biases: list[Any] = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = _joined(biases) if biases else None
        self._addresses = self._seen()
        self._given: torch.Tensor | None = None
        self._found: Sequence[torch.Tensor] = ()

    @property
    def _parameters(self) -> list[torch.Tensor]:
        given = [(layer.weight, layer.bias) for layer in self._layers]
        return [one for pair in given for one in pair if one is not None]

    def _seen(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(one.data_ptr(), one.stride()) for one in self._parameters]

    def all(self, given: torch.Tensor) -> torch.Tensor | None:
        """Return all outputs side by side; ``None`` if gradients are on or a weight has moved."""
        if torch.is_grad_enabled() or self._seen() != self._addresses:
            return None
        return functional.linear(given, self._weight, self._bias)

    def of(self, index: int, given: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer at ``index``, ``[..., out_features]``."""
        if index == 0:
            found = self.all(given)
            self._given = None if found is None else given
            self._found = () if found is None else found.split(self._sizes, -1)
        if self._given is not given:
            layer = self._layers[index]
            return functional.linear(given, layer.weight, layer.bias)
        part = self._found[index]
        if index == len(self._sizes) - 1:
            self._given, self._found = None, ()
        return part

    def gated(
        self, module: Any, kernel: SiluAndMul, given: torch.Tensor, *others: Any, **options: Any
    ) -> torch.Tensor:
        """Return the output of a gated feed-forward ``module``, ``[..., hidden]``."""
        both = None if others or options else self.all(given)
        if both is None:
            return type(module).forward(module, given, *others, **options)
        return module.down_proj(kernel(both))


@torch.inference_mode()
def _silu_and_mul_for(module: Any, products: _MergedLinear) -> SiluAndMul | None:
    """Return the gate kernel for a module; ``None`` unless a trial gives the module's outputs."""
    children = vars(module)["_modules"]
    if {*children} - {"gate_proj", "up_proj", "down_proj", "act_fn"} or "forward" in vars(module):
        return None
    if any(map(_has_hooks, filter(None, children.values()))):
        return None
    weight = products._weight
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, weight.shape[1], generator=generator, dtype=torch.float32)
    given = numbers.to(weight.device, weight.dtype)
    try:
        kernel = GATE_KERNELS[weight.device.type]()
        points = torch.linspace(-60, 60, 961, dtype=torch.float32, device=weight.device)
        if not torch.allclose(module.act_fn(points), functional.silu(points), atol=1e-6):
            return None
        # Scale the rows: the largest gate or up value of each is 1, 30 or 100, to detect a clamp.
        largest = functional.linear(given, weight).float().abs().amax(1).clamp(min=1e-6)
        given = given * (torch.tensor([1.0, 30.0, 100.0], device=weight.device) / largest)[:, None]
        given = given.to(weight.dtype)
        expected = type(module).forward(module, given)
        found = products.gated(module, kernel, given)
        is_same = bool(expected.any()) and is_close(found, expected)
    except Exception as error:  # third-party code, or the kernel does not compile
        logger.info("%s is not fused: the trial failed", type(module).__name__, exc_info=error)
        return None
    return kernel if is_same else None
