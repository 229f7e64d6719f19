"""Linear layers with int8 weights, for the CPU: they take a quarter of the memory of float32.

A weight is an int8 times a scale of its output, ``max|w| / 127``. Activations have a scale for each
row, ``max|x| / 16256`` (compare LLM.int8(), arXiv:2208.07339, section 2.1: 127 for both), and two
digits of 8 bits, ``x = scale * (128 * high + low)``: with one digit, SmolLM2's rows change visibly.
Integer products are exact but for the last bit of sums beyond ``2**24``; apart from that, no row
depends on the other rows of its batch.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from genlm_backend.errors import ModelStateError, OptionError, UnsupportedModelError
from genlm_backend.runtime.compiled import compiled

logger = logging.getLogger(__name__)

_LARGEST: Final = 127  # the largest code of a weight
_ZERO: Final = 128  # the zero point of unsigned digits
_SMALLEST: Final = 1e-30  # smaller maxima count as zero
_MAX_WIDTH: Final = 1 << 16  # largest number of inputs whose sums of products fit into 32 bits


def quantize(model: Any) -> None:
    """Replace a model's float32 linear layers by int8 ones, unless wider than ``_MAX_WIDTH``."""
    if not _is_exact():
        raise OptionError(
            "weights='int8' needs oneDNN's exact int8 matrix products, which this processor or "
            "this build of torch lacks"
        )
    num_bytes, all_bytes = 0, sum(weight.nbytes for weight in model.parameters())
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            weight = _matrix(layer)
            if weight is not None and weight.shape[1] <= _MAX_WIDTH:
                num_bytes += weight.nbytes
                setattr(parent, name, Int8Linear(weight, layer.bias))
    if not num_bytes:
        name = type(model).__name__
        raise OptionError(f"weights='int8' needs linear layers in float32, and {name} has none")
    if num_bytes < all_bytes / 2:
        warnings.warn(
            f"weights='int8' converts only linear layers, with {num_bytes / all_bytes:.0%} of the "
            f"weights of {type(model).__name__}: the other weights stay in float32",
            stacklevel=2,
        )
    try:
        with torch.inference_mode():
            model(torch.tensor([[0, 0]], dtype=torch.int64))
    except AttributeError as error:
        raise UnsupportedModelError(
            f"weights='int8' does not support {type(model).__name__}, whose code uses its linear "
            f"layers for more than products: {error}"
        ) from error


def _matrix(layer: nn.Module) -> torch.Tensor | None:
    """Return the weight ``[outputs, inputs]`` of a float32 linear layer, or ``None``."""
    if type(layer) is nn.Linear:
        weight = layer.weight.detach()
    elif type(layer) is Conv1D:
        weight = layer.weight.detach().t()
    else:
        return None
    return weight if weight.dtype is torch.float32 else None


@final
class Int8Linear(nn.Module):
    """A linear layer with int8 weights, for float32 activations on the CPU, without gradients."""

    scale: torch.Tensor
    zero: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        largest = weight.abs().amax(1)
        scale = torch.where(largest < _SMALLEST, 1.0, largest / _LARGEST)
        codes = (weight / scale[:, None]).round_().to(torch.int8).contiguous()
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.zeros(len(codes), dtype=torch.int32))
        # Digests of weights read these sums, since elements of a packed weight cannot be read.
        for dim in (0, 1):
            self.register_buffer(f"sums_{dim}", codes.sum(dim, dtype=torch.int64))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # ``keep_vars=True`` only inspects the weights
            raise ModelStateError(
                "int8 weights cannot be saved: save the original model, and load it with "
                "weights='int8'"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of ``[…, in_features]`` and the weight, plus the bias."""
        if input.dtype is not torch.float32:
            raise TypeError(f"int8 weights need float32 activations, got {input.dtype}")
        rows = input.detach().reshape(-1, self.in_features).contiguous()
        num_rows = len(rows)
        digits = torch.empty((2 * num_rows, self.in_features), dtype=torch.uint8)
        scales = torch.empty(num_rows, dtype=torch.float32)
        elements = rows.numpy()
        _take_apart(elements, elements.view(np.int32), digits.numpy(), scales.numpy())
        products = _products(digits, self._packed, self.scale, self.zero)
        _add_up(products.numpy(), scales.numpy())
        found = products[:num_rows].view(*input.shape[:-1], self.out_features)
        return found if self.bias is None else found.add_(self.bias)


def _products(
    digits: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> torch.Tensor:
    """Return the products of digits and a packed weight: float32 ``[rows, out_features]``."""
    return torch.ops.onednn.qlinear_pointwise(
        *(digits, 1.0, _ZERO, packed, scale, zero, None), *(1.0, 0, torch.float32, "none", [], "")
    )


def _is_exact() -> bool:
    """Whether even the largest products of digits are exact; on some processors they saturate."""
    digits = torch.tensor([[255] * 64, [1] * 64, [0, 255] * 32], dtype=torch.uint8)
    codes = torch.tensor([[127] * 64, [-127] * 64, [127, -127] * 32], dtype=torch.int8)
    scale, zero = torch.ones(3, dtype=torch.float32), torch.zeros(3, dtype=torch.int32)
    try:
        found = _products(digits, torch.ops.onednn.qlinear_prepack(codes, None), scale, zero)
    except (RuntimeError, AttributeError) as error:  # a build of torch without these operators
        logger.debug("int8 products cannot be computed", exc_info=error)
        return False
    return torch.equal(found.long(), (digits.long() - _ZERO) @ codes.long().t())


@compiled
def _take_apart(rows: Any, bits: Any, digits: Any, scales: Any) -> None:
    """Write the high digits of all rows, then the low ones, and the scale of each row."""
    num_rows, width = rows.shape
    as_bits = scales.view(np.int32)
    for index in range(num_rows):
        row, own, high, low = rows[index], bits[index], digits[index], digits[num_rows + index]
        # Bits of absolute values, as integers, sort like the values; an integer maximum vectorises.
        # The scale of a row with an infinity or a NaN is NaN.
        largest_bits = np.int32(0)
        for column in range(width):
            largest_bits = max(largest_bits, np.int32(own[column] & np.int32(0x7FFFFFFF)))
        as_bits[index] = largest_bits
        largest = scales[index]
        factor = np.float32(0)
        if largest_bits >= np.int32(0x7F800000):
            scales[index] = np.float32(np.nan)
        elif largest > np.float32(1e-30):
            factor = np.float32(16256) / largest
            scales[index] = largest / np.float32(16256)
        else:
            scales[index] = np.float32(0)
        for column in range(width):  # the offset makes codes positive; its 0.5 rounds
            code = np.int32(row[column] * factor + np.float32(16448.5))
            high[column] = np.uint8(code >> np.int32(7))
            low[column] = np.uint8((code & np.int32(127)) + np.int32(64))


@compiled
def _add_up(products: Any, scales: Any) -> None:
    """Write ``scale * (128 * high + low)`` over ``high``, the first half of the products."""
    num_rows = len(scales)
    for index in range(num_rows):
        high, low = products[index], products[num_rows + index]
        scale = scales[index]
        scale_of_high = scale * np.float32(128)
        for column in range(high.shape[0]):
            high[column] = high[column] * scale_of_high + low[column] * scale
