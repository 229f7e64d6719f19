"""PackedMask: the tokens that may come next, a bit for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from genlm_backend.checks import integer, sequence
from genlm_backend.errors import OptionError
from genlm_backend.model.query import check_known_ids

_NO_TOKEN: Final = "allowed has no token: nothing can be drawn"


@final
@dataclass(frozen=True, slots=True)
class PackedMask:
    """Tokens that may come next, a bit for each, as ``draw_next_token`` takes them.

    Attributes:
        bits: The bits, as ``numpy.packbits`` packs them: ``ceil(vocab_size / 8)`` bytes, of which
            what is beyond the vocabulary is 0.
        vocab_size: Number of ids that the model has.
    """

    bits: bytes
    vocab_size: int

    def unpacked(self) -> torch.Tensor:
        """Return whether each token may come: bool ``[vocab_size]``, the caller's to modify."""
        bools = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=self.vocab_size)
        return torch.from_numpy(bools.view(np.bool_))


Allowed: TypeAlias = torch.Tensor | NDArray[np.bool_] | PackedMask | Iterable[int]
"""Tokens that may be drawn: bools ``[vocab]``, packed bits, or token ids."""


def packed_mask(allowed: Any, vocab_size: int, may_be_empty: bool = False) -> bytes | None:
    """Return the mask of the tokens that may be drawn, a bit for each, once it is checked.

    Args:
        allowed: Array or tensor of bools ``[vocab_size]``, a ``PackedMask``, or a collection of
            token ids; ``None`` for all tokens.
        vocab_size: Number of ids that the model has.
        may_be_empty: Whether no token may be drawn, too.

    Raises:
        OptionTypeError: (``TypeError``) If it is neither.
        OptionError: (``ValueError``) If it is of another shape, an id is outside the vocabulary, or
            no token is allowed.
    """
    if allowed is None:
        return None
    if isinstance(allowed, PackedMask):
        if allowed.vocab_size != vocab_size or len(allowed.bits) != -(-vocab_size // 8):
            raise OptionError(
                f"allowed must be a mask of {vocab_size} tokens, as the vocabulary has; got one of "
                f"{allowed.vocab_size} in {len(allowed.bits)} bytes"
            )
        if not any(allowed.bits) and not may_be_empty:
            raise OptionError(_NO_TOKEN)
        return allowed.bits
    values = allowed.detach().cpu().numpy() if isinstance(allowed, torch.Tensor) else allowed
    if isinstance(values, np.ndarray) and values.dtype == bool:
        if values.shape != (vocab_size,):
            raise OptionError(
                f"allowed must be one of {vocab_size} elements, as the vocabulary has; got the "
                f"shape {values.shape}"
            )
        mask = values
    else:
        if isinstance(values, np.ndarray):
            is_long = values.dtype.kind in "iu" and values.shape == (vocab_size,) != (2,)
            if is_long and set(values.tolist()) <= {0, 1}:
                raise OptionError(
                    f"allowed is a mask of numbers, {values.dtype} [{vocab_size}], and would be "
                    "read as token ids: pass bools"
                )
            if values.dtype.kind not in "iu" or values.ndim != 1:
                values = values.tolist()  # to be refused as a list is
        is_checked = isinstance(values, np.ndarray)
        ids = values if is_checked else np.array(_IDS("allowed", values), np.int64)
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        check_known_ids("allowed", wrong[:1].tolist(), vocab_size)
        mask = np.zeros(vocab_size, bool)
        mask[ids] = True
    if not mask.any() and not may_be_empty:
        raise OptionError(_NO_TOKEN)
    return np.packbits(mask).tobytes()


_IDS: Final = sequence(integer(), "an array of bools or a collection of token ids")
