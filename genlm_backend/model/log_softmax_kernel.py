"""Triton kernels: log-softmax of wide rows in any dtype to float32, with log normalisers.

One launch reduces chunks of a row, a second one merges them and writes it: logits are read twice.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_CHUNK: Final = 4096
"""Columns of a program."""


@triton.jit(do_not_specialize=["width", "num_chunks"])
def _reduce(logits, row_stride, largest, sums, width, num_chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf"))
    x = x.to(tl.float32)
    top = tl.max(x, 0)
    # A chunk of minus infinities alone adds nothing, where inf - inf would be NaN.
    shift = tl.where(top == -float("inf"), 0.0, top)
    tl.store(largest + row * num_chunks + chunk, top)
    tl.store(sums + row * num_chunks + chunk, tl.sum(tl.exp(x - shift), 0))


@triton.jit(do_not_specialize=["width", "num_chunks"])
def _write(
    logits, row_stride, largest, sums, found, normalisers, width, num_chunks, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    each = tl.arange(0, CHUNKS)
    is_chunk = each < num_chunks
    tops = tl.load(largest + row * num_chunks + each, mask=is_chunk, other=-float("inf"))
    parts = tl.load(sums + row * num_chunks + each, mask=is_chunk, other=0.0)
    top = tl.max(tops, 0)
    shares = tl.where(tops == -float("inf"), 0.0, tl.exp(tops - top))
    total = tl.log(tl.sum(tl.where(parts == 0.0, 0.0, parts * shares), 0))
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    is_there = column < width
    x = tl.load(logits + row * row_stride + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(found + row * width + column, (x - top) - total, mask=is_there)
    if chunk == 0:
        tl.store(normalisers + row, tl.where(top == -float("inf"), float("nan"), top + total))


def log_softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 log-probabilities ``[n, vocab]`` and log normalisers ``[n]``."""
    num_rows, width = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_chunks = triton.cdiv(width, _CHUNK)
    parts = torch.empty((2, num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    # NaN for a row with NaN or positive infinity, or without a finite logit.
    found = torch.empty((num_rows, width), dtype=torch.float32, device=logits.device)
    normalisers = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    grid, stride = (num_rows, num_chunks), logits.stride(0)
    reduce: Any = _reduce[grid]  # pyright: ignore[reportIndexIssue]
    write: Any = _write[grid]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(logits):  # or it is launched on the one that is current
        reduce(logits, stride, *parts, width, num_chunks, CHUNK=_CHUNK)
        write(
            logits,
            stride,
            *parts,
            found,
            normalisers,
            width,
            num_chunks,
            CHUNK=_CHUNK,
            CHUNKS=triton.next_power_of_2(num_chunks),
        )
    return found, normalisers
