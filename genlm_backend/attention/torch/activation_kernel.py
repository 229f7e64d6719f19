"""A Triton kernel: the product of a gate by SiLU (Elfwing et al., 2018, arXiv:1702.03118)."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_BLOCK: Final = 1024
"""Columns of a program."""


@triton.jit(do_not_specialize=["width"])
def _silu_and_mul(both, row_stride, found, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    at = both + row * row_stride + column
    gate = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_there, other=0.0).to(tl.float32)
    # Rounded to the type in between, as torch does.
    silu = (gate / (1 + tl.exp(-gate))).to(found.dtype.element_ty).to(tl.float32)
    tl.store(found + row * width + column, (silu * up).to(found.dtype.element_ty), mask=is_there)


def silu_and_mul(both: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` of ``[..., 2 * width]``, gates first, as ``[..., width]``."""
    width = both.shape[-1] // 2
    rows = both.reshape(-1, 2 * width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    found = both.new_empty((*both.shape[:-1], width))
    grid = (len(rows), triton.cdiv(width, _BLOCK))
    launch: Any = _silu_and_mul[grid]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(both):  # or it is launched on the one that is current
        launch(rows, rows.stride(0), found, width, BLOCK=_BLOCK)
    return found
