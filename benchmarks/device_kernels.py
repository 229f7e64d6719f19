"""Fused elementwise kernels of Triton, to be timed beside torch's."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _add_rms_norm(x, residual, weight, total, normed, width, eps, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_there = column < width
    at = row * width + column
    added = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    added += tl.load(residual + at, mask=is_there, other=0.0).to(tl.float32)
    added = added.to(x.dtype.element_ty)
    tl.store(total + at, added, mask=is_there)
    wide = added.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed + at, (wide * scale * factor).to(x.dtype.element_ty), mask=is_there)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sum and its norm."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[1]
    launch: Any = _add_rms_norm[(len(x),)]  # pyright: ignore[reportIndexIssue]
    size = triton.next_power_of_2(width)
    launch(x, residual, weight, total, normed, width, eps, WIDTH=size, num_warps=8)
    return total, normed


@triton.jit
def _silu_mul(gate, up, found, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    silu = (g / (1 + tl.exp(-g))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(found + at, (silu * u).to(gate.dtype.element_ty), mask=at < size)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the product of ``silu(gate)`` and ``up``."""
    found = torch.empty_like(gate)
    launch: Any = _silu_mul[(triton.cdiv(gate.numel(), 1024),)]  # pyright: ignore[reportIndexIssue]
    launch(gate, up, found, gate.numel(), BLOCK=1024)
    return found
