"""Operators of attention whose every number is on the device, so that a launch can be recorded.

They are tried on random numbers, as decode steps call them, before they are used for a type of
elements, a size of heads and of their groups; so none has to be believed on a device that nobody
has seen.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, final

import torch

logger = logging.getLogger(__name__)


@final
class StepOperators(NamedTuple):
    """The two operators of which the attention of a decode step consists.

    Keys and values are in the rows of a table ``codes``, ``[num_slots, 2 * key_heads * dim]``. The
    heads of a group, which share a head of keys, are queries of their own.

    Attributes:
        in_stretches: Attention of ``S`` sequences of queries, each to a stretch of slots that
            follow one another. Given are queries ``[N, key_heads, dim]``; keys and values
            ``[num_slots, key_heads, dim]``; the bounds of the sequences among the queries, int32
            ``[S + 1]``; the first slot of each stretch, int32 ``[S + 1]``, of which the last is not
            read; its number of slots, int32 ``[S]``; the most queries of a sequence; and what
            products are multiplied by. Returned are weighted means ``[N, key_heads, dim]`` and
            logarithms of the sums of the exponentials of the scores, float32 ``[key_heads, N]``.
        in_slots: Attention of each row to tokens in any slots, one or more, merged with its
            pieces of the former. Given are queries ``[B, heads, dim]``; ``codes``; slots, int64
            ``[n]``; where those of each row begin among them, int32 ``[B]``; how many they are,
            int32 ``[B]``; what the former has returned, or ``None``; the pieces of each row in it,
            by the number of its first query over the size of groups, int64 ``[B, P]``, -1 for none;
            one more score for each head, which has no value, ``[heads]`` or ``None``; what products
            are multiplied by; and the number of heads of keys. Returned are means ``[B, heads,
            dim]``.
    """

    in_stretches: Callable[
        [
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            int,
            float,
        ],
        tuple[torch.Tensor, torch.Tensor],
    ]
    in_slots: Callable[
        [
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            tuple[torch.Tensor, torch.Tensor] | None,
            torch.Tensor,
            torch.Tensor | None,
            float,
            int,
        ],
        torch.Tensor,
    ]


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bounds: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    most_queries: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-2 (Dao, 2023, arXiv:2307.08691): float16 and bfloat16."""
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


def _of_cuda() -> StepOperators:
    from genlm_backend.attention.torch.slots_kernel import attend_in_slots

    return StepOperators(_flash, attend_in_slots)


OPERATORS: Final[dict[str, Callable[[], StepOperators]]] = {"cuda": _of_cuda}
"""Operators that there may be, by the kind of a device."""

_ROUNDING: Final = 3e-2


@functools.cache
def step_operators(
    device: torch.device, dtype: torch.dtype, dim: int, group_size: int
) -> StepOperators | None:
    """Return the operators for heads of ``dim`` elements; ``None`` where there are none."""
    if device.type not in OPERATORS:
        return None
    try:
        operators = OPERATORS[device.type]()
        distances = [
            _distance(operators, device, dtype, dim, group_size, has_sinks)
            for has_sinks in (False, True)
        ]
    except Exception as error:  # whatever an operator raises of what it does not take
        logger.info("decode steps of %s are not recorded", dtype, exc_info=error)
        return None
    logger.debug("operators of decode steps of %s are %s off", dtype, distances)
    return operators if max(distances) <= _ROUNDING else None


_STRETCHES: Final = (((0, 1, 3), 11, 700), ((2,), 720, 1), ((), 0, 0), ((1, 3), 800, 64))
"""Stretches that operators are tried on: who reads each, its first slot and its size."""

_COUNTS: Final = (1, 40, 7, 130)
"""Tokens in slots of the rows that they are tried on."""


@torch.inference_mode()
def _distance(
    operators: StepOperators,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    group_size: int,
    has_sinks: bool,
) -> float:
    """Return the largest difference of operators from the formula in float64."""
    num_rows, num_key_heads, generator = len(_COUNTS), 2, torch.Generator().manual_seed(0)
    scale = 0.7 * dim**-0.5  # another one than operators take by themselves

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    def integers(given: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(given, dtype=dtype, device=device)

    query = numbers(num_rows, num_key_heads * group_size, dim)
    codes, sinks = numbers(1200, 2 * num_key_heads * dim), numbers(num_key_heads * group_size)
    slots = torch.randint(1, 1200, (sum(_COUNTS),), generator=generator, dtype=torch.int64)
    of_rows = slots.split(list(_COUNTS))
    readers = [row for rows, _, _ in _STRETCHES for row in rows]
    pieces = [[i for i, reader in enumerate(readers) if reader == row] for row in range(num_rows)]
    padded = [[*own, *[-1] * (3 - len(own))] for own in pieces]
    ends = [sum(len(rows) for rows, _, _ in _STRETCHES[:i]) for i in range(len(_STRETCHES) + 1)]
    on_device, table = query.to(device), codes.to(device)
    grouped = on_device[integers(readers, torch.int64)].unflatten(1, (num_key_heads, group_size))
    keys, values = (part.unflatten(1, (num_key_heads, dim)) for part in table.chunk(2, 1))
    of_parts = operators.in_stretches(
        grouped.transpose(1, 2).reshape(-1, num_key_heads, dim),
        keys,
        values,
        integers([end * group_size for end in ends]),
        integers([*(start for _, start, _ in _STRETCHES), 0]),
        integers([size for _, _, size in _STRETCHES]),
        num_rows * group_size,
        scale,
    )
    found = operators.in_slots(
        on_device,
        table,
        slots.to(device),
        integers([sum(_COUNTS[:row]) for row in range(num_rows)]),
        integers(list(_COUNTS)),
        of_parts,
        torch.tensor(padded, dtype=torch.int64, device=device),
        sinks.to(device) if has_sinks else None,
        scale,
        num_key_heads,
    )
    largest = 0.0
    for row in range(num_rows):
        own = [torch.arange(s, s + n) for rows, s, n in _STRETCHES if row in rows]
        keys, values = (
            part.unflatten(1, (num_key_heads, dim)).double()
            for part in codes[torch.cat([of_rows[row], *own])].chunk(2, 1)
        )
        scores = torch.einsum(
            "hgd,nhd->hgn", query[row].double().unflatten(0, (num_key_heads, -1)), keys
        )
        weights = (scores * scale).exp()
        total = weights.sum(-1)
        if has_sinks:
            total = total + sinks.double().exp().view(num_key_heads, -1)
        expected = torch.einsum("hgn,nhd->hgd", weights, values) / total[..., None]
        difference = (found[row].cpu().double() - expected.flatten(0, 1)).abs().max()
        largest = max(largest, float(difference.nan_to_num(torch.inf)))
    return largest
