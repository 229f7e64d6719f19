"""Token weights: their checks and dtypes, and the operations that combine them below a node."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from genlm_backend.errors import WeightsError, WeightsTypeError

if TYPE_CHECKING:
    import torch

Operation = Literal["sum", "max", "log_sum"]
"""The sum, the maximum or the log-sum-exp of the token weights under every prefix."""

Weights = Any
"""One weight per token: a NumPy array, a torch tensor on any device, or a sequence of numbers."""


def is_tensor(weights: Weights) -> bool:
    """Whether ``weights`` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(weights, torch.Tensor)


def check_weights(weights: Weights, num_tokens: int) -> Weights:
    """Return ``weights`` as an array or tensor ``[num_tokens]``, without changing its dtype."""
    weights = as_array(weights)
    if weights.ndim != 1 or weights.shape[0] != num_tokens:
        is_batch = weights.ndim == 2 and weights.shape[1] == num_tokens
        hint = "; pass a batch of weights to the method whose name begins with batch_"
        raise WeightsError(
            f"weights must have shape [{num_tokens}], one per token, got {list(weights.shape)}"
            f"{hint if is_batch else ''}"
        )
    return weights


def check_batch(batch: Any, num_tokens: int) -> Any:
    """Check a batch; return an array or tensor ``[batch, num_tokens]``, or a list of rows."""
    if is_tensor(batch) or isinstance(batch, np.ndarray):
        batch = as_array(batch)
        if batch.ndim != 2 or batch.shape[1] != num_tokens:
            raise WeightsError(
                f"a batch of weights must have shape [batch, {num_tokens}], one per token, "
                f"got {list(batch.shape)}"
            )
        return batch
    if not hasattr(batch, "__iter__"):
        raise WeightsTypeError(f"a batch of weights must be a sequence of rows, got {batch!r}")
    return [check_weights(weights, num_tokens) for weights in batch]


def to_numpy(weights: Weights) -> NDArray[np.floating]:
    """Return checked weights as a plain float32 or float64 array, copied only if necessary."""
    if is_tensor(weights):
        if weights.dtype == _torch().bfloat16:
            weights = weights.float()
        weights = weights.numpy(force=True)
    dtype = weights.dtype
    is_single = dtype.kind == "b" or (dtype.kind == "f" and dtype.itemsize <= 4)
    # Contiguous, aligned and writable, since Numba would compile again for any other kind.
    return np.require(weights, np.float32 if is_single else np.float64, ["C", "A", "W"])


def torch_dtype(dtype: torch.dtype) -> torch.dtype:
    import torch

    is_single = dtype == torch.bool or (dtype.is_floating_point and dtype.itemsize <= 4)
    return torch.float32 if is_single else torch.float64


def as_array(weights: Weights) -> Any:
    """Return ``weights`` as an array or dense tensor of a dtype that every trie supports."""
    if is_tensor(weights):
        is_dense = weights.layout == _torch().strided and not weights.is_nested
        if not is_dense or weights.dtype not in _dtypes():
            raise WeightsTypeError(
                f"weights must be a dense tensor of real numbers, got {weights.dtype}, "
                f"{weights.layout}: convert them, for example with weights.to_dense().float()"
            )
        if weights.device.type == "meta":
            raise WeightsTypeError("weights must be real numbers: a tensor on 'meta' holds none")
        return weights
    try:
        array = np.asarray(weights)
    except (ValueError, TypeError, RuntimeError) as error:  # such as a list of GPU tensors
        raise WeightsTypeError(f"weights must be an array of real numbers: {error}") from error
    if array.dtype.kind not in "fiub":
        raise WeightsTypeError(f"weights must be real numbers, got an array of {array.dtype}")
    return array


def _torch() -> Any:
    return sys.modules["torch"]


@functools.cache
def _dtypes() -> frozenset[Any]:
    """Return the real dtypes that torch shares with NumPy, and bfloat16."""
    names = (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 bfloat16"
    )
    return frozenset(getattr(_torch(), name) for name in names.split())
