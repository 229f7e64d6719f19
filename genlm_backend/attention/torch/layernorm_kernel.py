"""A Triton kernel: a residual and the root mean square norm of it (arXiv:1910.07467) in one."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


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
    given: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``given + residual`` and its norm, ``[..., width]`` each."""
    width, shape = given.shape[-1], given.shape
    rows, others = (
        one if one.stride(1) == 1 else one.contiguous()
        for one in (given.reshape(-1, width), residual.reshape(-1, width))
    )
    total, normed = given.new_empty(shape), given.new_empty(shape)
    launch: Any = _fused_add_rms_norm[(len(rows),)]  # pyright: ignore[reportIndexIssue]
    size = triton.next_power_of_2(width)
    with torch.cuda.device_of(given):  # or it is launched on the one that is current
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
