"""Triton kernels of decode steps: write keys and values, group queries, attend to slots.

Each kernel replaces several operators of torch, whose launches take longer than their arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _with_split(means, total, largest, values, sums):
    """Merge means of values and their logsumexps into the running ones, by online softmax."""
    now = tl.maximum(largest, sums)
    weights, kept = tl.exp(sums - now), tl.exp(largest - now)
    return means * kept[:, None] + values * weights[:, None], total * kept + weights, now


@triton.jit
def _with_splits(
    means, total, largest, values, sums, splits, num_splits, each, GROUP_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, is_query, is_value,
):  # fmt: skip
    """Merge in results of shared runs of slots, at the indices in ``splits``; -1 marks none."""
    for number in range(0, num_splits):
        split = tl.load(splits + number).to(tl.int64)
        if split >= 0:
            at = split * GROUP_SIZE + each
            own_sums = tl.load(sums + at, mask=is_query, other=0.0)
            own = tl.load(values + at[:, None] * WIDTH, mask=is_value, other=0.0).to(tl.float32)
            means, total, largest = _with_split(means, total, largest, own, own_sums)
    return means, total, largest


# If it specialised these arguments, Triton would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_queries", "num_splits"])
def _attend(
    query, codes, slots, starts, counts, part_values, part_sums, splits, sinks, found, scale, width,
    num_queries, num_splits, NUM_KEY_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    DIM: tl.constexpr, QUERIES: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    each, dims = tl.arange(0, QUERIES), tl.arange(0, DIMS)
    is_query, is_dim = each < GROUP_SIZE, dims < DIM
    is_value = is_query[:, None] & is_dim[None, :]
    own = (row * NUM_KEY_HEADS + head) * GROUP_SIZE + each
    q = tl.load(query + own[:, None] * DIM + dims[None, :], mask=is_value, other=0.0)
    start, count = tl.load(starts + row), tl.load(counts + row)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    means = tl.zeros([QUERIES, DIMS], tl.float32)
    for first in range(0, count, BLOCK):
        number = first + tl.arange(0, BLOCK)
        is_there = number < count
        slot = tl.load(slots + start + number, mask=is_there, other=0)
        at = codes + slot.to(tl.int64)[:, None] * width + head * DIM + dims[None, :]
        is_key = is_there[:, None] & is_dim[None, :]
        keys = tl.load(at, mask=is_key, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_there[None, :], scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        weights, kept = tl.exp(scores - now[:, None]), tl.exp(largest - now)
        values = tl.load(at + NUM_KEY_HEADS * DIM, mask=is_key, other=0.0)
        added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        means = means * kept[:, None] + added
        total = total * kept + tl.sum(weights, 1)
        largest = now
    means, total, largest = _with_splits(
        means, total, largest, part_values + head * DIM + dims[None, :],
        part_sums + head * num_queries, splits + row * num_splits, num_splits, each, GROUP_SIZE,
        NUM_KEY_HEADS * DIM, is_query, is_value,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP_SIZE + each, mask=is_query, other=0.0).to(tl.float32)
        means, total, largest = _with_split(means, total, largest, tl.zeros_like(means), sink)
    to = found + own[:, None] * DIM + dims[None, :]
    tl.store(to, (means / total[:, None]).to(found.dtype.element_ty), mask=is_value)


def attend_in_slots(
    query: Tensor,
    codes: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    of_parts: tuple[Tensor, Tensor] | None,
    splits: Tensor,
    sinks: Tensor | None,
    scale: float,
    num_key_heads: int,
) -> Tensor:
    """Attend slot by slot, merge in results of runs (``of_parts``): ``[B, heads, dim]``."""
    num_rows, num_heads, dim = query.shape
    group_size = num_heads // num_key_heads
    query = query.contiguous()
    found = torch.empty_like(query)
    per_row = triton.next_power_of_2(max(1, len(slots) // num_rows))
    if of_parts is None:  # placeholders, which are not read, since there are no splits
        of_parts = query, query.new_empty((1, 1), dtype=torch.float32)
        splits = splits[:, :0]
    values, sums = (part.contiguous() for part in of_parts)
    launch: Any = _attend[(num_rows, num_key_heads)]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(query):  # or Triton launches on the current device
        launch(
            query,
            codes,
            slots,
            starts,
            counts,
            values,
            sums,
            splits,
            query if sinks is None else sinks,
            found,
            scale,
            codes.stride(0),
            sums.shape[1],
            splits.shape[1],
            NUM_KEY_HEADS=num_key_heads,
            GROUP_SIZE=group_size,
            DIM=dim,
            QUERIES=max(16, triton.next_power_of_2(group_size)),
            DIMS=max(16, triton.next_power_of_2(dim)),
            BLOCK=min(64, max(16, per_row)),
            HAS_SINKS=sinks is not None,
        )
    return found


@triton.jit
def _write(
    keys, values, slots, codes, width, keys_row, keys_head, values_row, values_head,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    row, slot = tl.program_id(0).to(tl.int64), tl.load(slots + tl.program_id(0))
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIMS)[None, :]
    is_there = (head < NUM_HEADS) & (dim < DIM)
    own_keys = tl.load(keys + row * keys_row + head * keys_head + dim, mask=is_there)
    own_values = tl.load(values + row * values_row + head * values_head + dim, mask=is_there)
    to = codes + slot * width + head * DIM + dim
    tl.store(to, own_keys, mask=is_there)
    tl.store(to + NUM_HEADS * DIM, own_values, mask=is_there)


def reshape_and_cache(keys: Tensor, values: Tensor, slots: Tensor, codes: Tensor) -> None:
    """Write keys and values, ``[B, key_heads, 1, dim]`` each, to slots of ``codes``."""
    keys, values = (one if one.stride(-1) == 1 else one.contiguous() for one in (keys, values))
    num_rows, num_heads, _, dim = keys.shape
    launch: Any = _write[(num_rows,)]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(keys):  # or Triton launches on the current device
        launch(
            keys,
            values,
            slots,
            codes,
            codes.stride(0),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            NUM_HEADS=num_heads,
            DIM=dim,
            HEADS=triton.next_power_of_2(num_heads),
            DIMS=triton.next_power_of_2(dim),
        )


@triton.jit
def _group(
    query, readers, found, row_stride, head_stride, NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(readers + number).to(tl.int64)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIMS)[None, :]
    is_there = (head < NUM_HEADS) & (dim < DIM)
    own = tl.load(query + row * row_stride + head * head_stride + dim, mask=is_there)
    # From [key heads, group] to [group, key heads].
    place = (head % GROUP_SIZE) * (NUM_HEADS // GROUP_SIZE) + head // GROUP_SIZE
    tl.store(found + number * (NUM_HEADS * DIM) + place * DIM + dim, own, mask=is_there)


def group_queries(query: Tensor, readers: Tensor, num_key_heads: int) -> Tensor:
    """Gather the queries of the ``N`` rows ``readers``: ``[N * group, key_heads, dim]``."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    _, num_heads, dim = query.shape
    group_size = num_heads // num_key_heads
    found = query.new_empty((len(readers) * group_size, num_key_heads, dim))
    launch: Any = _group[(len(readers),)]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(query):  # or Triton launches on the current device
        launch(
            query,
            readers,
            found,
            query.stride(0),
            query.stride(1),
            NUM_HEADS=num_heads,
            GROUP_SIZE=group_size,
            DIM=dim,
            HEADS=triton.next_power_of_2(num_heads),
            DIMS=triton.next_power_of_2(dim),
        )
    return found
