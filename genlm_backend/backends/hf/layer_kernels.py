"""Triton kernels for layers: rotary positions (Su et al., 2021, arXiv:2104.09864), gated
activations and normalisations of residuals.

One launch does the work of several torch operators, with rounding at the same points.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_HEADS: Final = 8
"""Heads that one program rotates."""


@triton.jit
def _product(one, other):
    """Multiply in float32 and round to the dtype, as torch does."""
    return (one.to(tl.float32) * other.to(tl.float32)).to(one.dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    given, head_stride, found, block, num_heads, dims, cos, other_cos, sin, other_sin,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate a block of a token's heads; ``found`` holds all heads of the token, contiguous."""
    head = block * HEADS + tl.arange(0, HEADS)
    is_there = (head < num_heads)[:, None] & (dims < HALF)[None, :]
    at = given + head.to(tl.int64)[:, None] * head_stride + dims[None, :]
    to = found + head[:, None] * (2 * HALF) + dims[None, :]
    first = tl.load(at, mask=is_there, other=0.0)
    second = tl.load(at + HALF, mask=is_there, other=0.0)
    rotated = _product(first, cos) - _product(second, sin)
    other_rotated = _product(second, other_cos) + _product(first, other_sin)
    tl.store(to, rotated.to(first.dtype), mask=is_there)
    tl.store(to + HALF, other_rotated.to(first.dtype), mask=is_there)


# If it specialised these arguments, Triton would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_tokens", "num_heads", "num_key_heads", "query_blocks"])
def _rotate(
    query, keys, cos, sin, found_query, found_keys, num_tokens, num_heads, num_key_heads,
    query_blocks, query_row, query_head, query_token, keys_row, keys_head, keys_token, cos_row,
    cos_token, sin_row, sin_token, HALF: tl.constexpr, DIMS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    place, block = tl.program_id(0), tl.program_id(1)
    row, token = (place // num_tokens).to(tl.int64), (place % num_tokens).to(tl.int64)
    number = place.to(tl.int64)
    dims = tl.arange(0, DIMS)
    is_dim = dims < HALF
    cos += row * cos_row + token * cos_token + dims
    sin += row * sin_row + token * sin_token + dims
    own_cos = tl.load(cos, mask=is_dim, other=0.0)[None, :]
    other_cos = tl.load(cos + HALF, mask=is_dim, other=0.0)[None, :]
    own_sin = tl.load(sin, mask=is_dim, other=0.0)[None, :]
    other_sin = tl.load(sin + HALF, mask=is_dim, other=0.0)[None, :]
    if block < query_blocks:
        _rotate_heads(
            query + row * query_row + token * query_token, query_head,
            found_query + number * (num_heads * 2 * HALF), block, num_heads,
            dims, own_cos, other_cos, own_sin, other_sin, HALF, HEADS,
        )  # fmt: skip
    else:
        _rotate_heads(
            keys + row * keys_row + token * keys_token, keys_head,
            found_keys + number * (num_key_heads * 2 * HALF), block - query_blocks, num_key_heads,
            dims, own_cos, other_cos, own_sin, other_sin, HALF, HEADS,
        )  # fmt: skip


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x * cos + rotate_half(x) * sin`` of queries and keys, bit for bit as torch does."""
    num_rows, num_heads, num_tokens, dim = query.shape
    num_key_heads = keys.shape[1]
    found_query, found_keys = (
        given.new_empty((num_rows, num_tokens, given.shape[1], dim)) for given in (query, keys)
    )
    query_blocks = triton.cdiv(num_heads, _HEADS)
    grid = (num_rows * num_tokens, query_blocks + triton.cdiv(num_key_heads, _HEADS))
    launch: Any = _rotate[grid]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(query):  # or Triton launches on the current device
        launch(
            query,
            keys,
            cos,
            sin,
            found_query,
            found_keys,
            num_tokens,
            num_heads,
            num_key_heads,
            query_blocks,
            *query.stride()[:3],
            *keys.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1),
            sin.stride(0) if len(sin) > 1 else 0,
            sin.stride(1),
            HALF=dim // 2,
            DIMS=triton.next_power_of_2(dim // 2),
            HEADS=_HEADS,
            enable_fp_fusion=False,  # a fused multiply-add rounds once, torch twice
        )
    return found_query.transpose(1, 2), found_keys.transpose(1, 2)


_BLOCK: Final = 1024
"""Columns that one program computes."""


@triton.jit(do_not_specialize=["width"])
def _silu_and_mul(both, row_stride, found, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    at = both + row * row_stride + column
    gate = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_there, other=0.0).to(tl.float32)
    # Rounded to the dtype before the product, as torch does.
    silu = (gate / (1 + tl.exp(-gate))).to(found.dtype.element_ty).to(tl.float32)
    tl.store(found + row * width + column, (silu * up).to(found.dtype.element_ty), mask=is_there)


def silu_and_mul(both: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (arXiv:1702.03118) of ``[..., 2 * width]``, the gates first."""
    width = both.shape[-1] // 2
    rows = both.reshape(-1, 2 * width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    found = both.new_empty((*both.shape[:-1], width))
    grid = (len(rows), triton.cdiv(width, _BLOCK))
    launch: Any = _silu_and_mul[grid]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(both):  # or Triton launches on the current device
        launch(rows, rows.stride(0), found, width, BLOCK=_BLOCK)
    return found


@triton.jit(do_not_specialize=["width"])
def _fused_add_rms_norm(
    given, given_stride, residual, residual_stride, weight, total, normed, width, eps,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_there = column < width
    one = tl.load(given + row * given_stride + column, mask=is_there, other=0.0)
    other = tl.load(residual + row * residual_stride + column, mask=is_there, other=0.0)
    added = (one.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row * width + column, added, mask=is_there)
    wide = added.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed + row * width + column, (wide * scale * factor).to(added.dtype), mask=is_there)


def fused_add_rms_norm(
    given: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``given + residual`` and its RMS norm (arXiv:1910.07467), ``[..., width]`` each."""
    width, shape = given.shape[-1], given.shape
    rows, others = (
        one if one.stride(1) == 1 else one.contiguous()
        for one in (given.reshape(-1, width), residual.reshape(-1, width))
    )
    total, normed = given.new_empty(shape), given.new_empty(shape)
    launch: Any = _fused_add_rms_norm[(len(rows),)]  # pyright: ignore[reportIndexIssue]
    size = triton.next_power_of_2(width)
    with torch.cuda.device_of(given):  # or Triton launches on the current device
        launch(
            rows,
            rows.stride(0),
            others,
            others.stride(0),
            weight.contiguous(),
            total,
            normed,
            width,
            eps,
            WIDTH=size,
            num_warps=8 if size > 1024 else 4,
        )
    return total, normed
