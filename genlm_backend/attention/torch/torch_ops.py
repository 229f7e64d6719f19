"""torch's operators, with fused attention operators that return the logsumexps too.

The logsumexps serve to merge blocks. The CPU has one operator for all types and head sizes. CUDA
has two, each of which rejects some types and shapes. So these two are compared with the formula on
random numbers in a pool's layout. For each type and head size, the first that agrees is used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from genlm_backend.attention.softmax_attention import ArrayOps, AttentionState

logger = logging.getLogger(__name__)

_aten: Final = torch.ops.aten

_ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2}
_DEFAULT_ROUNDING: Final = 3e-2

Found: TypeAlias = tuple[Tensor, Tensor]
"""Weighted means ``[N, heads, M, dim]``; float32 or float64 logsumexps ``[N, heads, M]``."""


@final
@dataclass(frozen=True, slots=True)
class FusedOperator:
    """An operator's functions without and with a mask tensor, and whether to split many keys."""

    attend: Callable[[Tensor, Tensor, Tensor, float, bool], Found]
    attend_with: Callable[[Tensor, Tensor, Tensor, float, Tensor], Found] | None = None
    is_parted: bool = False


def _on_processor(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | bool
) -> Found:
    """The CPU's fused attention; ``mask`` is a tensor, ``True`` for causal, or ``False``."""
    added = mask if isinstance(mask, Tensor) else None
    if added is not None and query.dtype is torch.float64:
        added = added.double()
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, is_causal=mask is True, attn_mask=added, scale=scale
    )


def _flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool) -> Found:
    """FlashAttention-2 (Dao, 2023, arXiv:2307.08691), for float16 and bfloat16."""
    found = _aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, is_causal, False, scale=scale
    )
    return found[0], found[1]


def _efficient(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | bool
) -> Found:
    """xFormers' memory-efficient attention, for float32 too; ``mask`` as in ``_on_processor``."""
    bias = None
    if isinstance(mask, Tensor):  # the kernel needs aligned rows
        num_keys = mask.shape[3]
        aligned = torch.nn.functional.pad(mask.to(query.dtype), (0, -num_keys % 16))
        bias = aligned[..., :num_keys].expand(-1, query.shape[1], -1, -1)
    found = _aten._scaled_dot_product_efficient_attention(
        query, keys, values, bias, True, 0.0, mask is True, scale=scale
    )
    return found[0], found[1][:, :, : query.shape[2]]  # the kernel pads the logsumexps


FUSED_OPERATORS: Final[dict[str, tuple[FusedOperator, ...]]] = {
    "cpu": (FusedOperator(_on_processor, _on_processor, is_parted=True),),
    "cuda": (FusedOperator(_flash, _efficient), FusedOperator(_efficient, _efficient)),
}
"""Operators by device type; on CUDA, the first that agrees with the formula is used."""

_BLOCKS: Final = (
    ((1, 2, 40, 1500), "none"),
    ((5, 2, 1, 701), "none"),
    ((1, 3, 70, 33), "none"),
    ((3, 4, 24, 24), "causal"),
    ((1, 6, 150, 150), "causal"),
)
_MASKED: Final = (((5, 2, 4, 43), "masked"), ((3, 3, 70, 201), "masked"), ((4, 2, 1, 90), "masked"))
"""Test cases, as in ``_BLOCKS``: numbers of rows, heads, queries and keys, and the kind of mask."""


@functools.cache
def fused_operator(device: torch.device, dtype: torch.dtype, dim: int) -> FusedOperator | None:
    """Return the fused operator for heads of ``dim`` elements; ``None`` if none agrees."""
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
    """Return whether an operator accepts the test cases ``blocks`` and agrees with the formula."""
    tolerance = _ROUNDING.get(dtype, _DEFAULT_ROUNDING)
    try:
        return all(
            _distance(operator, shape, mask, device, dtype, dim) <= tolerance
            for shape, mask in blocks
        )
    except Exception as error:  # operators raise various errors for unsupported input
        logger.debug(
            "an attention operator does not support %s heads of size %s", dtype, dim, exc_info=error
        )
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
    """Return the largest absolute difference of an operator from the formula in float64."""
    num_rows, num_heads, num_queries, num_keys = shape
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32}
    query = torch.randn(num_rows, num_heads, num_queries, dim, **options)
    kept = torch.randn(num_rows, num_keys, 2 * num_heads * dim, **options)  # the layout of a pool
    query, kept = query.to(dtype), kept.to(dtype)
    keys, values = _by_head(kept, num_heads, dim)
    scale = 0.7 * dim**-0.5  # not the default, so that an ignored scale would show
    scores = query.double() @ keys.double().transpose(2, 3) * scale
    mask = torch.zeros(num_rows, 1, num_queries, num_keys, dtype=torch.float32)
    if masked == "causal":
        mask += torch.full_like(mask, -torch.inf).triu(1)
    elif masked == "masked":  # each query attends to the last key at least
        is_left_out = torch.rand(mask.shape, **options) < 0.5
        mask[..., :-1].masked_fill_(is_left_out[..., :-1], -torch.inf)
        mask[0, ..., : num_keys - 8], mask[1] = -torch.inf, 0  # row 0: some of the last 8; 1: all
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
    """Return rows of keys and values ``[N, n, width]`` as views ``[N, heads, n, dim]`` each."""
    keys, values = (
        part.unflatten(2, (num_heads, dim)).transpose(1, 2) for part in kept.chunk(2, -1)
    )
    return keys, values


FEW_QUERIES: Final = 16
"""Largest number of queries for which keys are split; unsplit, each head gets one thread."""

NUM_STRETCHES: Final = 4
"""Number of parts that keys are split into, so that each part gets a thread."""

SHORTEST_STRETCH = 512
"""Fewest keys per part for which splitting pays off."""


def _products(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    return torch.matmul((query * scaling).float(), keys.float().transpose(2, 3))


def _means(weights: Tensor, total: Tensor, values: Tensor) -> Tensor:
    if values.dtype is not torch.float32:  # an undivided sum may overflow float16
        return torch.matmul(weights.div_(total).to(values.dtype), values)
    return torch.matmul(weights, values).div_(total)


def _fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    mask: Tensor | None,
    causal_group: int,
) -> Found | None:
    num_rows, num_groups, num_queries, dim = query.shape
    fused = fused_operator(query.device, query.dtype, dim) if dim == values.shape[-1] else None
    if fused is None:
        return None
    if causal_group:
        shape = num_rows, num_groups * causal_group, num_queries // causal_group, dim
        keys, values = (all_of.repeat_interleave(causal_group, 1) for all_of in (keys, values))
        found, logsumexp = fused.attend(query.reshape(shape), keys, values, scaling, True)
        shape = num_rows, num_groups, num_queries
        return found.reshape(*shape, found.shape[-1]), logsumexp.reshape(shape)
    if mask is not None:
        attend_with = fused.attend_with
        return None if attend_with is None else attend_with(query, keys, values, scaling, mask)
    size = keys.shape[2] // NUM_STRETCHES
    if (
        fused.is_parted
        and num_rows == 1
        and num_queries <= FEW_QUERIES
        and size >= SHORTEST_STRETCH
    ):
        return _in_stretches(fused.attend, query, keys, values, scaling, size)
    return fused.attend(query, keys, values, scaling, False)


def _in_stretches(
    attend: Callable[[Tensor, Tensor, Tensor, float, bool], Found],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    size: int,
) -> Found:
    """Attend from few queries to many keys, split into parts for parallel threads."""
    stop = size * NUM_STRETCHES
    parted_keys, parted_values = (
        all_of[0, :, :stop].unflatten(1, (-1, size)).transpose(0, 1) for all_of in (keys, values)
    )
    queries = query.expand(NUM_STRETCHES, -1, -1, -1)
    found, logsumexp = attend(queries, parted_keys, parted_values, scaling, False)
    shares = logsumexp.softmax(0).unsqueeze(-1)
    merged = (found * shares).sum(0, keepdim=True).to(found.dtype)
    total = AttentionState(TORCH, merged, logsumexp.logsumexp(0, keepdim=True))
    if stop < keys.shape[2]:
        left = keys[:, :, stop:], values[:, :, stop:]
        total.merge_state(AttentionState(TORCH, *attend(query, *left, scaling, False)), None)
    return total.values, total.logsumexp


TORCH: Final[ArrayOps[Tensor]] = ArrayOps(
    lib=torch,
    put=lambda tensor, device: tensor.to(device),
    device_of=attrgetter("device"),
    as_type_of=Tensor.type_as,
    fill_=Tensor.masked_fill_,
    at_least_=Tensor.clamp_,
    exp_=Tensor.exp_,
    tanh_=Tensor.tanh_,
    lerp=torch.lerp,
    largest=lambda scores: scores.amax(-1, keepdim=True),
    total=lambda weights: weights.sum(-1, keepdim=True),
    products=_products,
    means_=_means,
    fused=_fused,
)
"""torch's operators, for any device."""
