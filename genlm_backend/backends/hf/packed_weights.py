"""Packed weights: linear layers with weights in oneDNN's blocked layout.

oneDNN reorders a matrix into blocks once, instead of reading the stored layout in every product.
Whether that is faster depends on the processor and on the shape, so a trial decides.
"""

from __future__ import annotations

import logging
import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn import functional

from genlm_backend.runtime.memory import cpu_budget
from genlm_backend.runtime.progress import stage

logger = logging.getLogger(__name__)

DTYPES: Final = (torch.float32, torch.bfloat16)
"""Dtypes of the weights that may be packed."""

_NUM_ROWS: Final = 20  # rows of the input that packing assumes and trials use
_NUM_LAYERS: Final = 4  # layers that a trial runs in turn: no weight then stays in the CPU's caches
_NUM_ROUNDS: Final = 5
_GAIN: Final = 0.95


@final
class PackedWeights:
    """Packed copies of a model's linear weights whose shapes a trial found faster when packed."""

    # A layer stops using its packed copy once the weight's version counter or address changes.
    # Writes that leave the counter unchanged (through ``.data``, or by fused optimizers) need
    # ``pack_again``. Packed and plain products differ by rounding.
    def __init__(self) -> None:
        self._packed: list[_Packed] = []
        self._remember()

    @stage("packing weights")
    def pack(self, model: Any) -> None:
        """Pack a model's weights into at most a quarter of the free memory, and at most 4 GiB."""
        by_shape: defaultdict[tuple[Any, ...], list[nn.Linear]] = defaultdict(list)
        for layer in getattr(model, "modules", list)():
            if type(layer) is nn.Linear and _can_be_packed(layer.weight):
                by_shape[layer.weight.dtype, *layer.weight.shape].append(layer)
        left = cpu_budget()
        for shape, layers in by_shape.items():
            num_bytes = sum(layer.weight.nbytes for layer in layers)
            # One trial per dtype, shape and number of threads decides for the whole process, so
            # that equal models have equal rows.
            if num_bytes <= left and _is_worth_it(shape, layers[:_NUM_LAYERS]):
                left -= num_bytes
                self._packed += map(_Packed, layers)
                logger.info("packed %d weights of %s", len(layers), shape)
        self._remember()

    def place(self, views: Mapping[nn.Module, Any]) -> None:
        """Make a view's copies of the packed layers compute with the packed weights."""
        for one in self._packed:
            view: Any = views.get(one.layer)
            if type(view) in (nn.Linear, PackedLinear):
                view.__class__ = PackedLinear
                vars(view)["packed"] = one

    def check_weights(self) -> None:
        """Let each layer use its packed weight unless the original's address or version changed."""
        # Whole lists are compared first, which is fast, because this runs before every batch.
        is_there = [*map(_address, self._parameters)] == self._addresses
        if is_there and self._are_used and [*map(_version, self._parameters)] == self._versions:
            return
        for one in self._packed:
            one.is_used = one.is_current
        self._are_used = all(one.is_used for one in self._packed)

    def pack_again(self) -> None:
        for one in self._packed:
            one.is_used = _can_be_packed(one.layer.weight)
        self._packed = [one for one in self._packed if one.is_used]
        for one in self._packed:
            one.pack()
        self._remember()

    def clear(self) -> None:
        self._packed.clear()
        self._remember()

    @property
    def nbytes(self) -> int:
        return sum(one.weight.nbytes for one in self._packed)

    def _remember(self) -> None:
        """Record the parameters that are packed, with their addresses and versions at that time."""
        self._parameters = [one.parameter for one in self._packed]
        self._addresses = [one.weight.data_ptr() for one in self._packed]
        self._versions = [one.version for one in self._packed]
        self._are_used = all(one.is_used for one in self._packed)


@final
class PackedLinear(nn.Linear):
    """A linear layer of a view that computes with the packed weight."""

    packed: _Packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of ``[…, in_features]`` and the weight, plus the bias."""
        packed = self.packed
        # PEFT changes a layer's class while it computes with an adapter of a bare parameter.
        if not packed.is_used or type(self) is not PackedLinear:
            return functional.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, packed.packed, self.bias, "none", [], "")


@final
class _Packed:
    """The packed weight of one layer, and the weight that it was packed from."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.pack()

    def pack(self) -> None:
        """Pack the weight that the layer has now."""
        self.parameter, self.weight = self.layer.weight, self.layer.weight.detach()
        with torch.no_grad():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _NUM_ROWS)
        self.version = self.parameter._version
        self.is_used = True

    @property
    def is_current(self) -> bool:
        """Whether the parameter has the address and version counter that it had when packed."""
        own = self.parameter
        is_there = own.data_ptr() == self.weight.data_ptr() and not own.is_inference()
        return is_there and own._version == self.version


_address = torch.Tensor.data_ptr
_version = operator.attrgetter("_version")


def _can_be_packed(weight: torch.Tensor) -> bool:
    is_plain = type(weight) is nn.Parameter and weight.layout is torch.strided
    if not is_plain or weight.is_inference():  # inference tensors have no version counter
        return False
    is_matrix = weight.ndim == 2 and weight.is_contiguous()
    return is_matrix and weight.device.type == "cpu" and weight.dtype in DTYPES


_found: dict[tuple[Any, ...], bool] = {}
"""Whether packing is faster on this processor, by dtype, shape and number of threads."""


def _is_worth_it(shape: tuple[Any, ...], layers: list[nn.Linear]) -> bool:
    """Whether layers of one shape are faster when packed, with equal outputs but for rounding."""
    key = (*shape, torch.get_num_threads())
    if key not in _found:
        _found[key] = _is_better(layers)
    return _found[key]


def _is_better(layers: list[nn.Linear]) -> bool:
    packed = [PackedLinear(1, 1, device="meta") for _ in layers]
    try:
        for own, layer in zip(packed, layers, strict=True):
            own.weight, own.bias = layer.weight, layer.bias
            vars(own)["packed"] = _Packed(layer)
        return _is_same(packed[0], layers[0]) and _is_faster(packed, layers)
    except (RuntimeError, AttributeError) as error:  # a processor or build without packing
        logger.debug("weights cannot be packed", exc_info=error)
        return False


@torch.inference_mode()
def _is_same(packed: nn.Linear, layer: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = layer.weight
    shape = _NUM_ROWS, weight.shape[1]
    rows = torch.randn(shape, generator=generator, dtype=torch.float32).to(weight.dtype)
    found, expected = packed(rows).float(), layer(rows).float()
    tolerance = 8 * torch.finfo(weight.dtype).eps * expected.abs().max()
    return bool(((found - expected).abs() <= tolerance).all())


@torch.inference_mode()
def _is_faster(packed: list[PackedLinear], layers: list[nn.Linear]) -> bool:
    weight = layers[0].weight
    rows = torch.ones(_NUM_ROWS, weight.shape[1], dtype=weight.dtype)
    ratios = []
    for _ in range(_NUM_ROUNDS):
        plain = _seconds(lambda: [layer(rows) for layer in layers])
        ratios.append(_seconds(lambda: [layer(rows) for layer in packed]) / plain)
    return statistics.median(ratios[1:]) < _GAIN


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
