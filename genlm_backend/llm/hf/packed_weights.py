"""Packed weights: a model's products, from weights laid out as the processor reads them fastest.

oneDNN lays a matrix out in blocks once, instead of reading it as it is stored each time. Whether
that is faster depends on the processor and on the shape, so it is tried.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, final

import psutil
import torch
from torch import nn
from torch.nn import functional

logger = logging.getLogger(__name__)

DTYPES: Final = (torch.float32, torch.bfloat16)
"""Types of the weights that are tried."""

_NUM_ROWS: Final = 20  # of a step
_NUM_LAYERS: Final = 4  # of one shape, one after another, so that none comes from the caches
_NUM_ROUNDS: Final = 5
_GAIN: Final = 0.95
_SHARE_OF_MEMORY: Final = 0.25


@final
class PackedLinear(nn.Linear):
    """A linear layer that has its weight a second time, packed.

    A copy of it has its weight once, and one whose weight has been replaced or trained does without
    the packed one; both compute as any linear layer does.
    """

    def pack(self) -> None:
        """Pack the weight as it is now.

        Raises:
            RuntimeError: If this processor, or this build of torch, cannot.
        """
        with torch.no_grad():
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _NUM_ROWS)
        vars(self)["packed"] = packed, _state(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the products of the weight and of ``[…, in_features]``, plus the bias."""
        packed, state = vars(self).get("packed", (None, None))
        if packed is None or _state(self.weight) != state or torch.is_grad_enabled():
            return functional.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, packed, self.bias, "none", [], "")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "packed"}


def _state(weight: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a weight is replaced, or modified in place."""
    return weight.data_ptr(), weight._version


def pack_weights(model: Any) -> int:
    """Pack the weights of a model's linear layers, of those shapes whose products it makes faster.

    Weights stay where they are as well, so that as much memory is needed again for the packed
    ones, a quarter of what is free at most. Their products are the same but for rounding. To be
    called on the thread that the model runs on, which tries each shape for a moment.

    Args:
        model: A model of transformers, which nobody else runs meanwhile.

    Returns:
        Number of bytes of the packed weights.
    """
    by_shape: defaultdict[tuple[Any, ...], list[nn.Linear]] = defaultdict(list)
    for layer in getattr(model, "modules", list)():
        if type(layer) is nn.Linear and _can_be_packed(layer.weight):
            by_shape[layer.weight.dtype, *layer.weight.shape].append(layer)
    left = int(psutil.virtual_memory().available * _SHARE_OF_MEMORY)
    total = 0
    for shape, layers in by_shape.items():
        num_bytes = sum(layer.weight.nbytes for layer in layers)
        if num_bytes <= left - total and _is_worth_it(layers[:_NUM_LAYERS]):
            total += num_bytes
            for layer in layers:
                _pack(layer)
            logger.info("packed %d weights of %s", len(layers), shape)
    return total


def _can_be_packed(weight: torch.Tensor) -> bool:
    is_plain = type(weight) is nn.Parameter and weight.layout is torch.strided
    if not is_plain or weight.is_inference():  # which counts no modifications
        return False
    return weight.device.type == "cpu" and weight.dtype in DTYPES and weight.ndim == 2


def _pack(layer: nn.Linear) -> None:
    layer.__class__ = PackedLinear
    assert isinstance(layer, PackedLinear)
    layer.pack()


def _is_worth_it(layers: list[nn.Linear]) -> bool:
    """Whether packed layers of one shape are faster, and compute the same but for rounding."""
    packed = [PackedLinear(1, 1, device="meta") for _ in layers]
    try:
        for own, layer in zip(packed, layers, strict=True):
            own.weight, own.bias = layer.weight, layer.bias
            own.pack()
        return _is_same(packed[0], layers[0]) and _is_faster(packed, layers)
    except (RuntimeError, AttributeError) as error:  # a processor or a build that knows no packing
        logger.debug("weights cannot be packed", exc_info=error)
        return False


@torch.inference_mode()
def _is_same(packed: nn.Linear, layer: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = layer.weight
    rows = torch.randn(_NUM_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
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
