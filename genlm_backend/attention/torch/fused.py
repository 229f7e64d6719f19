"""Fused: torch's own operators of attention that return the sums of the weights too.

Blocks are merged by these sums. The processor has one operator for all cases, CUDA devices have
two, neither of which takes every type and shape. So each is compared with the formula on random
numbers in the layout of a pool; the first that agrees is used for that type and head size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_aten: Final = torch.ops.aten

_ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2}
_DEFAULT_ROUNDING: Final = 3e-2

Found: TypeAlias = tuple[Tensor, Tensor]
"""Weighted means of values ``[N, heads, M, dim]``, and float32 logarithms ``[N, heads, M]``."""


@final
@dataclass(frozen=True, slots=True)
class FusedOperator:
    """An operator of attention, and what it can do."""

    attend: Callable[[Tensor, Tensor, Tensor, float, bool], Found]
    attend_with: Callable[[Tensor, Tensor, Tensor, float, Tensor], Found] | None = None
    is_parted: bool = False


def _on_processor(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | bool
) -> Found:
    """The operator of the processor, with a mask, or causally or not."""
    added = mask if isinstance(mask, Tensor) else None
    if added is not None and query.dtype is torch.float64:
        added = added.double()
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, is_causal=mask is True, attn_mask=added, scale=scale
    )


def _flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool) -> Found:
    """FlashAttention-2 (Dao, 2023, arXiv:2307.08691): float16 and bfloat16."""
    found = _aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, is_causal, False, scale=scale
    )
    return found[0], found[1]


def _efficient(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | bool
) -> Found:
    """Attention of xFormers, for float32 too, with a mask, or causally or not."""
    bias = None
    if isinstance(mask, Tensor):  # whose rows have to begin at multiples of 16 bytes
        num_keys = mask.shape[3]
        aligned = torch.nn.functional.pad(mask.to(query.dtype), (0, -num_keys % 16))
        bias = aligned[..., :num_keys].expand(-1, query.shape[1], -1, -1)
    found = _aten._scaled_dot_product_efficient_attention(
        query, keys, values, bias, True, 0.0, mask is True, scale=scale
    )
    return found[0], found[1][:, :, : query.shape[2]]  # its sums are padded


FUSED_OPERATORS: Final[dict[str, tuple[FusedOperator, ...]]] = {
    "cpu": (FusedOperator(_on_processor, _on_processor, is_parted=True),),
    "cuda": (FusedOperator(_flash, _efficient), FusedOperator(_efficient, _efficient)),
}
"""Operators that there may be, by the kind of a device; the first is taken that is right."""

_BLOCKS: Final = (
    ((1, 2, 40, 1500), "none"),
    ((5, 2, 1, 701), "none"),
    ((1, 3, 70, 33), "none"),
    ((3, 4, 24, 24), "causal"),
    ((1, 6, 150, 150), "causal"),
)
_MASKED: Final = (((5, 2, 4, 43), "masked"), ((3, 3, 70, 201), "masked"), ((4, 2, 1, 90), "masked"))
"""Blocks that an operator is tried on: rows, heads, queries and keys; and the mask of each."""


@functools.cache
def fused_operator(device: torch.device, dtype: torch.dtype, dim: int) -> FusedOperator | None:
    """Return the operator for heads of ``dim`` elements, or ``None`` if there is none."""
    ops = FUSED_OPERATORS.get(device.type, ())
    if device.type == "cpu":
        return ops[0]
    for operator in ops:
        if _is_right(operator, _BLOCKS, device, dtype, dim):
            takes_masks = _is_right(operator, _MASKED, device, dtype, dim)
            return operator if takes_masks else replace(operator, attend_with=None)
    return None


def _is_right(
    operator: FusedOperator,
    blocks: tuple[tuple[tuple[int, int, int, int], str], ...],
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
) -> bool:
    """Return whether an operator agrees with the formula on some blocks."""
    tolerance = _ROUNDING.get(dtype, _DEFAULT_ROUNDING)
    try:
        return all(
            _distance(operator, shape, mask, device, dtype, dim) <= tolerance
            for shape, mask in blocks
        )
    except Exception as error:  # whatever an operator raises of what it does not take
        logger.debug("an operator of attention does not take %s of %s", dtype, dim, exc_info=error)
        return False


@torch.inference_mode()
def _distance(
    operator: FusedOperator,
    shape: tuple[int, int, int, int],
    masked: str,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
) -> float:
    """Return the largest difference of an operator from the formula in float64."""
    num_rows, num_heads, num_queries, num_keys = shape
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32}
    query = torch.randn(num_rows, num_heads, num_queries, dim, **options)
    kept = torch.randn(num_rows, num_keys, 2 * num_heads * dim, **options)  # as in slots
    query, kept = query.to(dtype), kept.to(dtype)
    keys, values = _by_head(kept, num_heads, dim)
    scale = 0.7 * dim**-0.5  # another one than operators take by themselves
    scores = query.double() @ keys.double().transpose(2, 3) * scale
    mask = torch.zeros(num_rows, 1, num_queries, num_keys, dtype=torch.float32)
    if masked == "causal":
        mask += torch.full_like(mask, -torch.inf).triu(1)
    elif masked == "masked":  # each query attends to the last key at least
        is_left_out = torch.rand(mask.shape, **options) < 0.5
        mask[..., :-1].masked_fill_(is_left_out[..., :-1], -torch.inf)
        mask[0, ..., : num_keys - 8], mask[1] = -torch.inf, 0  # all but the end, and nothing
    scores += mask
    expected = scores.softmax(-1) @ values.double(), scores.logsumexp(-1)
    on_device = _by_head(kept.to(device), num_heads, dim)
    given = query.to(device), *on_device, scale
    if masked == "masked":
        assert operator.attend_with is not None
        found = operator.attend_with(*given, mask.to(device))
    else:
        found = operator.attend(*given, masked == "causal")
    differences = [
        (one.cpu().double() - own).abs().max() for one, own in zip(found, expected, strict=True)
    ]
    return float(torch.stack(differences).nan_to_num(torch.inf).max())


def _by_head(kept: Tensor, num_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """From rows of keys and values ``[N, n, width]`` to ``[N, heads, n, dim]`` each, as views."""
    keys, values = (
        part.unflatten(2, (num_heads, dim)).transpose(1, 2) for part in kept.chunk(2, -1)
    )
    return keys, values
