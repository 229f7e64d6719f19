"""Masks of the allowed next tokens of a group's particles, in one array of bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import shown
from genlm_backend.errors import OptionError, OptionTypeError
from genlm_backend.readouts.draw import packed_mask

Masks = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Bits of ``M`` masks, uint8 ``[M, ceil(vocab_size / 8)]``; and for each particle the index of
its mask, or -1 if all tokens are allowed."""


def to_array(name: str, values: Any) -> NDArray[Any]:
    """Return a list, an array or a tensor on any device as a NumPy array."""
    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu().numpy()
        return np.asarray(values)
    except Exception as error:  # for a meta tensor, a ragged list or a failing ``__array__``
        raise OptionTypeError(f"{name} must be an array, got {shown(values)}") from error


def masks_of(
    allowed: Any, vocab_size: int, active: NDArray[np.int64], num_particles: int
) -> Masks | None:
    """Check ``allowed`` of ``draw``; return masks of the ``active`` particles; ``None`` stays."""
    if allowed is None:
        return None
    if isinstance(allowed, torch.Tensor):
        allowed = to_array("allowed", allowed)
    if isinstance(allowed, np.ndarray) and allowed.dtype == bool and allowed.ndim == 2:
        _check_rows("allowed", allowed, num_particles, vocab_size, "particle")
        return np.packbits(allowed[active], axis=1), np.arange(len(active))
    if isinstance(allowed, Sequence) and not isinstance(allowed, (str, bytes)):
        if len(allowed) != num_particles or any(isinstance(own, int) for own in allowed):
            raise OptionError(
                f"allowed must be a list with a mask or constraint for each of the {num_particles} "
                "particles, or one mask for all (token ids as an array or a set, not a list); got "
                f"{shown(allowed)}"
            )
        return _of_each([allowed[i] for i in active.tolist()], active, vocab_size)
    bits = packed_mask(allowed, vocab_size, may_be_empty=True)
    return _bits([bits or b""]), np.zeros(len(active), np.int64)


def masks_by_group(
    allowed: Any, vocab_size: int, group_ids: NDArray[np.int64], num_groups: int
) -> Masks:
    """Check ``allowed_by_group``; return the masks of particles, given the group of each."""
    table = to_array("allowed_by_group", allowed)
    _check_rows("allowed_by_group", table, num_groups, vocab_size, "group")
    return np.packbits(table, axis=1), group_ids


def _check_rows(name: str, table: NDArray[Any], num_rows: int, vocab_size: int, of: str) -> None:
    if table.dtype != bool or table.shape != (num_rows, vocab_size):
        raise OptionError(
            f"{name} must be bools [{num_rows}, {vocab_size}], one row for each {of}; got "
            f"{table.dtype} {list(table.shape)}"
        )


def _of_each(own: list[Any], active: NDArray[np.int64], vocab_size: int) -> Masks:
    """Return the masks of particles, given their entries of ``allowed``; equal states share one."""
    index_of, keys = dict[Any, int](), list[Any]()
    for one in own:
        key = one.state_key if hasattr(one, "state_key") else id(one)
        keys.append(key)
        index_of.setdefault(key, len(index_of))
    firsts = dict(zip(reversed(keys), reversed(own), strict=True))  # the first of each key
    distinct = [firsts[key] for key in index_of]
    constraints = [one for one in distinct if hasattr(one, "state_key")]
    made = iter(type(constraints[0]).masks(constraints) if constraints else ())
    given = [next(made) if hasattr(one, "state_key") else one for one in distinct]
    numbers, packed = list[int](), list[bytes]()
    for one, key in zip(given, index_of, strict=True):
        where = int(active[keys.index(key)])
        bits = packed_mask(one, vocab_size, may_be_empty=True, name=f"allowed[{where}]")
        numbers.append(-1 if bits is None else len(packed))
        if bits is not None:
            packed.append(bits)
    mask_of = np.array([numbers[index_of[key]] for key in keys], np.int64)
    if not packed:
        packed = [b"\xff" * -(-vocab_size // 8)]
    return _bits(packed), mask_of


def _bits(packed: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1)


def check_ids(name: str, values: Any, num_particles: int, vocab_size: int) -> NDArray[np.int32]:
    """Check a token id for each particle, or -1 for no token; return the ids as an int32 array."""
    ids = to_array(name, values)
    if ids.dtype.kind not in "iu" and ids.size:
        raise OptionTypeError(f"{name} must be integers [{num_particles}], got {shown(values)}")
    if ids.shape != (num_particles,):
        raise OptionError(
            f"{name} must have one id for each of the {num_particles} particles (-1: no token); "
            f"got the shape {list(ids.shape)}"
        )
    wrong = np.flatnonzero((ids < -1) | (ids >= vocab_size))
    if len(wrong):
        raise OptionError(
            f"{name}[{wrong[0]}] is {ids[wrong[0]]}, which is outside the vocabulary of "
            f"{vocab_size} ids"
        )
    return ids.astype(np.int32)
