"""Attention operators for captured steps; inputs that change are read from device buffers.

For each device, dtype, head size and group size, the operators are first tried on random numbers,
called as in a decode step, so that no device is trusted without a trial.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_OfParts: TypeAlias = tuple[Tensor, Tensor] | None


@final
class DecodeOps(NamedTuple):
    """The operators of a decode step's attention."""

    # The table of keys and values is ``[num_slots, 2 * key_heads * dim]``. For ``in_extents``, the
    # heads of a group, which share a key head, are separate queries.
    in_extents: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]
    ]
    in_slots: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, _OfParts, Tensor, Tensor | None, float, int],
        Tensor,
    ]

    # Queries [B, heads, dim], rows int [N], number of key heads -> [N * group, key_heads, dim]
    grouped: Callable[[Tensor, Tensor, int], Tensor]
    # Keys and values [B, key_heads, 1, dim] each, int64 slots [B], the table to write to
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None]


def _flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bounds: Tensor,
    starts: Tensor,
    sizes: Tensor,
    most_queries: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (Dao, 2023, arXiv:2307.08691), for float16 and bfloat16."""
    found = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        bounds,
        starts,
        most_queries,
        len(keys),
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=sizes,
    )
    return found[0], found[1]


def _of_cuda() -> DecodeOps:
    from genlm_backend.backends.hf.decode_kernels import (
        attend_in_slots,
        group_queries,
        reshape_and_cache,
    )

    return DecodeOps(_flash, attend_in_slots, group_queries, reshape_and_cache)


DECODE_OPS: Final[dict[str, Callable[[], DecodeOps]]] = {"cuda": _of_cuda}
"""Functions that return the operators, by type of device."""

_ROUNDING: Final = 3e-2


@functools.cache
def decode_ops_for(
    device: torch.device, dtype: torch.dtype, dim: int, group_size: int
) -> DecodeOps | None:
    """Return the operators for heads of ``dim`` elements; ``None`` if none pass a trial."""
    if device.type not in DECODE_OPS:
        return None
    try:
        ops = DECODE_OPS[device.type]()
        own = ops, device, dtype, dim, group_size
        distances = [_distance(*own, has_sinks) for has_sinks in (False, True)]
    except Exception as error:  # operators may raise anything
        logger.info(
            "decode steps in %s are not captured: their operators failed a trial",
            dtype,
            exc_info=error,
        )
        return None
    logger.debug("attention of decode steps in %s differs from its formula by %s", dtype, distances)
    return ops if max(distances) <= _ROUNDING else None


_STRETCHES: Final = (((0, 1, 3), 11, 700), ((2,), 720, 1), ((), 0, 0), ((1, 3), 800, 64))
"""Extents that operators are tried on: the rows that read each, its first slot and its size."""

_COUNTS: Final = (1, 40, 7, 130)
"""Tokens that each row of the trial reads slot by slot."""

_NUM_SLOTS: Final = 1200
_NUM_KEY_HEADS: Final = 2


@torch.inference_mode()
def _distance(
    ops: DecodeOps,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    group_size: int,
    has_sinks: bool,
) -> float:
    """Return the largest difference between the operators' outputs and the formula in float64."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    query = numbers(len(_COUNTS), _NUM_KEY_HEADS * group_size, dim)
    codes = numbers(_NUM_SLOTS, 2 * _NUM_KEY_HEADS * dim)
    sinks = numbers(_NUM_KEY_HEADS * group_size) if has_sinks else None
    slots = torch.randint(1, _NUM_SLOTS, (sum(_COUNTS),), generator=generator, dtype=torch.int64)
    scale = 0.7 * dim**-0.5  # not the default, so that an ignored scale would show
    found = _attended(ops, device, query, codes, sinks, slots, scale).cpu().double()
    expected = _by_formula(query.double(), codes.double(), sinks, slots, scale)
    return float((found - expected).abs().max().nan_to_num(torch.inf))


def _attended(
    ops: DecodeOps,
    device: torch.device,
    query: Tensor,
    codes: Tensor,
    sinks: Tensor | None,
    slots: Tensor,
    scale: float,
) -> Tensor:
    """Attend by the operators as decode steps do: ``[B, heads, dim]``, on the device."""
    num_rows, num_heads, dim = query.shape
    group_size = num_heads // _NUM_KEY_HEADS

    def integers(given: Iterable[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(list(given), dtype=dtype, device=device)

    readers = [row for rows, _, _ in _STRETCHES for row in rows]
    splits = [[i for i, reader in enumerate(readers) if reader == row] for row in range(num_rows)]
    ends = accumulate((len(rows) * group_size for rows, _, _ in _STRETCHES), initial=0)
    on_device, table = query.to(device), torch.empty_like(codes, device=device)
    new = codes.to(device).view(_NUM_SLOTS, 2, _NUM_KEY_HEADS, 1, dim)
    ops.write(new[:, 0], new[:, 1], integers(range(_NUM_SLOTS), torch.int64), table)
    keys, values = (part.unflatten(1, (_NUM_KEY_HEADS, dim)) for part in table.chunk(2, 1))
    of_parts = ops.in_extents(
        ops.grouped(on_device, integers(readers), _NUM_KEY_HEADS),
        keys,
        values,
        integers(ends),
        integers([*(start for _, start, _ in _STRETCHES), 0]),
        integers(size for _, _, size in _STRETCHES),
        num_rows * group_size,
        scale,
    )
    return ops.in_slots(
        on_device,
        table,
        slots.to(device, torch.int32),
        integers(accumulate(_COUNTS[:-1], initial=0)),
        integers(_COUNTS),
        of_parts,
        integers([*own, *[-1] * (3 - len(own))] for own in splits),
        None if sinks is None else sinks.to(device),
        scale,
        _NUM_KEY_HEADS,
    )


def _by_formula(
    query: Tensor, codes: Tensor, sinks: Tensor | None, slots: Tensor, scale: float
) -> Tensor:
    """Return the outputs that operators should return, in float64: ``[B, heads, dim]``."""
    found: list[Tensor] = []
    for row, own in enumerate(slots.split(list(_COUNTS))):
        extents = [
            torch.arange(start, start + size, dtype=torch.int64)
            for rows, start, size in _STRETCHES
            if row in rows
        ]
        keys, values = (
            part.unflatten(1, (_NUM_KEY_HEADS, -1))
            for part in codes[torch.cat([own, *extents])].chunk(2, 1)
        )
        queries = query[row].unflatten(0, (_NUM_KEY_HEADS, -1))
        weights = (torch.einsum("hgd,nhd->hgn", queries, keys) * scale).exp()
        total = weights.sum(-1)
        if sinks is not None:
            total = total + sinks.double().exp().view(_NUM_KEY_HEADS, -1)
        means = torch.einsum("hgn,nhd->hgd", weights, values) / total[..., None]
        found.append(means.flatten(0, 1))
    return torch.stack(found)
