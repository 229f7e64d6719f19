"""Packed weights: linear layers with second copies of their weights, laid out for speed.

oneDNN reorders a matrix into blocks once, instead of reading the stored layout in every product.
FBGEMM also packs once, but into 16-bit numbers, which take half as long to read; it sums products
in float32. It serves float32 weights that float16 rounds little, such as many from bfloat16 files.
Which layout is the fastest depends on the processor and on the shape, so a trial decides.
"""

from __future__ import annotations

import logging
import math
import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, final

import torch
from torch import nn
from torch.nn import functional

from genlm_backend.runtime.memory import cpu_budget
from genlm_backend.runtime.progress import stage

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

DTYPES: Final = (torch.float32, torch.bfloat16)
"""Dtypes of the weights that may be packed."""

_NUM_ROWS: Final = 20  # rows of the input that packing assumes
_ONE_ROW_BYTES: Final = 2**24  # smaller float32 weights in blocks do not serve a single row
_TRIAL_ROWS: Final = (4, _NUM_ROWS)  # rows of the inputs that trials time
_TRIAL_BYTES: Final = 2**25  # weights that a trial reads in turn, so that few stay in caches
_NUM_ROUNDS: Final = 5
_GAIN: Final = 0.95
MIN_BYTES = 2**16  # smaller weights take longer to be handed to a packed product than to be read


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
        by_kind: defaultdict[tuple[Any, ...], list[nn.Linear]] = defaultdict(list)
        for layer in getattr(model, "modules", list)():
            is_large = type(layer) is nn.Linear and layer.weight.nbytes >= MIN_BYTES
            if is_large and _can_be_packed(weight := layer.weight):
                by_kind[_fits_float16(weight), weight.dtype, *weight.shape].append(layer)
        left = cpu_budget()
        for kind, layers in by_kind.items():
            layout = _layout_of(kind, layers)
            num_bytes = sum(layout.num_bytes(layer.weight) for layer in layers) if layout else 0
            if layout and num_bytes <= left:
                left -= num_bytes
                self._packed += _each(partial(_Packed, layout=layout), layers, layout is _HALVES)
                logger.info("packed %d weights of %s", len(layers), kind)
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
        """Pack the weights that the layers have now, in blocks if float16 no longer holds them."""
        left = cpu_budget()
        for one in self._packed:
            one.is_used = _can_be_packed(one.layer.weight)
            if one.is_used:
                one.remember()
                if one.layout is _HALVES and not _fits_float16(one.weight):
                    one.layout, left = _BLOCKS, left - one.weight.nbytes
                    one.is_used = left >= 0
        self._packed = [one for one in self._packed if one.is_used]
        _each(_Packed.pack, self._packed, any(one.layout is _HALVES for one in self._packed))
        self._remember()

    def clear(self) -> None:
        self._packed.clear()
        self._remember()

    @property
    def nbytes(self) -> int:
        return sum(one.layout.num_bytes(one.weight) for one in self._packed)

    def _remember(self) -> None:
        """Record the packed parameters, with their addresses and versions when they were packed."""
        self._parameters = [one.parameter for one in self._packed]
        self._addresses = [one.weight.data_ptr() for one in self._packed]
        self._versions = [one.version for one in self._packed]
        self._are_used = all(one.is_used for one in self._packed)


@final
class PackedLinear(nn.Linear):
    """A linear layer of a view that computes with the packed weight."""

    packed: _Packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input``, ``[…, in_features]``, times the transposed weight, plus the bias."""
        packed = self.packed
        # PEFT changes a layer's class while it computes with an adapter of a bare parameter.
        is_packed = packed.is_used and type(self) is PackedLinear and input.ndim > 1
        if not is_packed or (packed.is_for_several and input.numel() == self.in_features):
            return functional.linear(input, self.weight, self.bias)
        return packed.layout.linear(input, packed.packed, self.bias)


class _Layout(NamedTuple):
    """A layout of weights, and the product that reads it."""

    pack: Callable[[torch.Tensor], Any]
    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    num_bytes: Callable[[torch.Tensor], int]


def _linear_of_blocks(rows: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _linear_of_halves(rows: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
    result = torch.ops.quantized.linear_dynamic_fp16(rows, packed)
    return result if bias is None else result.add_(bias)


_BLOCKS: Final = _Layout(
    lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_ROWS),
    _linear_of_blocks,
    lambda weight: weight.nbytes,
)
_HALVES: Final = _Layout(
    lambda weight: torch.ops.quantized.linear_prepack_fp16(weight, None),
    _linear_of_halves,
    lambda weight: weight.nbytes // 2,
)


@final
class _Packed:
    """The packed weight of one layer, and the weight that it was packed from."""

    def __init__(self, layer: nn.Linear, layout: _Layout) -> None:
        self.layer, self.layout = layer, layout
        self.remember()
        self.pack()

    def remember(self) -> None:
        """Record the weight that the layer has now; later writes to it do not go unnoticed."""
        self.parameter, self.version = self.layer.weight, self.layer.weight._version
        self.weight = self.parameter.detach()

    def pack(self) -> None:
        """Pack the recorded weight."""
        with torch.no_grad():
            self.packed = self.layout.pack(self.weight)
        # oneDNN wakes the other threads even for one row: 1.2 times MKL's time of SmolLM2's layers.
        is_small = self.weight.dtype == torch.float32 and self.weight.nbytes < _ONE_ROW_BYTES
        self.is_for_several = self.layout is _BLOCKS and is_small
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


@torch.inference_mode()
def _fits_float16(weight: torch.Tensor) -> bool:
    """Whether float16 moves no row and no column by more than a rounding of it in float32."""
    if weight.dtype != torch.float32 or not weight.numel():
        return False
    moved, whole = weight.new_zeros(2, weight.shape[1])  # sums of absolute values, by column
    for part in weight.split(2**16 // weight.shape[1] + 1):  # parts stay in a CPU's cache
        error, own = (part.half() - part).abs_(), part.abs()
        if not _is_rounding(error.sum(1), own.sum(1)):
            return False
        moved += error.sum(0)
        whole += own.sum(0)
    return _is_rounding(moved, whole)


def _is_rounding(moved: torch.Tensor, whole: torch.Tensor) -> bool:
    return bool((moved <= torch.finfo(torch.float32).eps * whole).all())


_found: dict[tuple[Any, ...], _Layout | None] = {}
"""Fit into float16, dtype, shape and number of threads → layout, or ``None`` if none is faster."""


def _layout_of(kind: tuple[Any, ...], layers: list[nn.Linear]) -> _Layout | None:
    """Return the first layout in which layers of this kind run faster than unpacked, if any."""
    # One trial decides for the whole process, so that equal models have equal rows.
    key = (*kind, torch.get_num_threads())
    if key not in _found:
        num_layers = _TRIAL_BYTES // layers[0].weight.nbytes + 1
        trial = partial(_relative_time, layers[:num_layers])
        layouts = [_HALVES, _BLOCKS] if kind[0] else [_BLOCKS]
        _found[key] = next((layout for layout in layouts if trial(layout) < _GAIN), None)
    return _found[key]


def _relative_time(layers: list[nn.Linear], layout: _Layout) -> float:
    """Return packed time over unpacked; infinite if packing fails or changes the products."""
    packed = [PackedLinear(1, 1, device="meta") for _ in layers]
    try:
        for own, layer in zip(packed, layers, strict=True):
            own.weight, own.bias = layer.weight, layer.bias
            vars(own)["packed"] = _Packed(layer, layout)
        return _time_ratio(packed, layers) if _are_close(packed[0], layers[0]) else math.inf
    except (RuntimeError, AttributeError) as error:  # a processor or build without the layout
        logger.debug("weights cannot be packed", exc_info=error)
        return math.inf


@torch.inference_mode()
def _are_close(packed: nn.Linear, layer: nn.Linear) -> bool:
    """Whether the products differ by no more than the rounding of sums in any order."""
    generator = torch.Generator().manual_seed(0)
    weight = layer.weight
    shape = _NUM_ROWS, weight.shape[1]
    rows = torch.randn(shape, generator=generator, dtype=torch.float32).to(weight.dtype)
    found, expected = packed(rows).float(), layer(rows).float()
    eps = torch.finfo(weight.dtype).eps
    tolerance = max(8, weight.shape[1] ** 0.5) * eps * expected.abs().max()
    return bool(((found - expected).abs() <= tolerance).all())


@torch.inference_mode()
def _time_ratio(packed: list[PackedLinear], layers: list[nn.Linear]) -> float:
    """Return the time of packed products over that of plain ones, averaged over numbers of rows."""
    weight = layers[0].weight
    inputs = [torch.ones(n, weight.shape[1], dtype=weight.dtype) for n in _TRIAL_ROWS]
    return statistics.mean(
        statistics.median(
            _seconds(packed, rows) / _seconds(layers, rows) for _ in range(_NUM_ROUNDS)
        )
        for rows in inputs
    )


def _seconds(layers: Sequence[nn.Linear], rows: torch.Tensor) -> float:
    start = time.perf_counter()
    for layer in layers:
        layer(rows)
    return time.perf_counter() - start


def _each(function: Callable[[T], R], items: list[T], in_threads: bool) -> list[R]:
    """Apply a function to items; in threads for FBGEMM, which packs slowly, and on one thread."""
    if not in_threads:
        return list(map(function, items))
    with ThreadPoolExecutor(torch.get_num_threads(), "pack") as threads:
        return list(threads.map(function, items))
