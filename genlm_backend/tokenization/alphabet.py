"""Alphabet: tokens sorted by bytes, so that those with a common prefix form an interval."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.tokenization.token import Token


@final
class Alphabet:
    """The tokens of a vocabulary, sorted by their bytes.

    Tokens that begin with the same bytes are adjacent. End tokens, special tokens and tokens
    without bytes come last, and count as sharing no prefix with any other token.

    Args:
        byte_vocab: The tokens by id, as bytes.
        ends: Ids of the tokens that end a text, and of all special tokens.
        undefined: Ids without a token; ``order`` and both masks leave them out.

    Attributes:
        order: The sorted token ids: int32, packed as ``bytes``.
        longest: Number of bytes of the longest token in ``others``.
        ends: Mask of the given ends and of tokens without bytes: bool ``[vocab]``.
        others: Mask of the remaining tokens, which make up texts: bool ``[vocab]``.
    """

    def __init__(
        self, byte_vocab: Sequence[Token], ends: Collection[int], undefined: Collection[int]
    ) -> None:
        spelt = [*enumerate(token.byte_string for token in byte_vocab)]
        left_out = {i for i, data in spelt if not data}.union(ends, undefined)
        pairs = sorted((data, i) for i, data in spelt if i not in left_out)
        own = [i for _, i in pairs]
        alone = sorted(left_out.difference(undefined))
        self._spelt: Final = [data for data, _ in pairs]
        self._bytes: Final = [data for _, data in spelt]
        self._alone: Final = {token_id: i for i, token_id in enumerate(alone, len(own))}
        self._order: Final = np.array([*own, *alone], np.int32)
        self.order: Final = self._order.tobytes()
        self.longest: Final = max(map(len, self._spelt), default=0)
        self.ends: Final = self._mask(alone)
        self.others: Final = self._mask(own)

    def _mask(self, token_ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self._bytes), np.bool_)
        mask[token_ids] = True
        return mask

    def beginning_with(self, data: bytes) -> NDArray[np.bool_]:
        """Return a mask of the tokens of ``others`` that begin with ``data``: bool ``[vocab]``."""
        return self._mask(self._order[slice(*self._interval(data))])

    def spelling(self, data: bytes) -> list[int]:
        """Return the ids of the tokens of ``others`` whose bytes are exactly ``data``."""
        start, stop = bisect_left(self._spelt, data), bisect_right(self._spelt, data)
        return self._order[start:stop].tolist()

    def _interval(self, data: bytes) -> tuple[int, int]:
        size = len(data)
        start = bisect_left(self._spelt, data)
        return start, bisect_right(self._spelt, data, start, key=lambda own: own[:size])

    def intervals(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return the intervals of the proper prefixes of ``n`` tokens: int32 ``[n, width, 2]``.

        Interval ``k`` of a token of ``m`` bytes, for ``k < m - 1``, is the range (start, stop) of
        indices into ``order`` of all tokens with the same first ``k + 1`` bytes. For a token in
        ``ends``, that is only the token itself. From ``m - 1`` on, intervals are empty. ``width``
        is the largest ``m``, minus 1.
        """
        width = max(1, *(len(self._bytes[i]) for i in token_ids), 1) - 1
        found = np.zeros((len(token_ids), width, 2), np.int32)
        for own, token_id in zip(found, token_ids, strict=True):
            data, place = self._bytes[token_id], self._alone.get(token_id)
            for size in range(1, len(data)):
                alone = None if place is None else (place, place + 1)
                own[size - 1] = alone or self._interval(data[:size])
        return found
