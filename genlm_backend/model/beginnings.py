"""Beginnings: common prefixes of lists of token ids that are asked one after another."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, final

TOKENS_PER_BLOCK: Final = 512
"""Number of token ids that are packed together."""


class _Block(NamedTuple):
    """Ids that have been checked, as many as a block has."""

    ids: list[int]
    packed: bytes
    like_bools: tuple[int, ...]

    @classmethod
    def of(cls, ids: list[int], packed: bytes) -> _Block:
        """Return a block of plain integers."""
        return cls(ids, packed, tuple([index for index, i in enumerate(ids) if i < 2]))


@final
class Beginnings:
    """The blocks that a list most likely begins with: those of one that came before it.

    To compare ids with known ones costs a fraction of what it costs to check and to convert them.
    A beginning is known once two lists in a row have had it, so that lists that have nothing in
    common cost nothing more. Any thread may call it.
    """

    def __init__(self) -> None:
        self._known: tuple[_Block, ...] = ()
        self._last: tuple[list[Any], tuple[bytes, ...]] = ([], ())

    def find(self, ids: list[Any]) -> tuple[bytes, ...]:
        """Return the packed blocks that ``ids`` are known to begin with."""
        if len(ids) < TOKENS_PER_BLOCK:
            return ()
        found = _shared(ids, self._known)
        last, packed = self._last
        if not found and packed and _begin_alike(ids, last):
            self._known = _blocks(last, packed)
            found = _shared(ids, self._known)
        return found

    def keep(self, num_found: int, ids: list[Any], blocks: tuple[bytes, ...]) -> None:
        """Remember the packed blocks of checked ids after those that have been found.

        The list is kept as it is, and must not be changed.
        """
        if not blocks:
            return
        if not num_found:
            self._last = ids, blocks
        elif num_found == len(known := self._known):
            self._known = (*known, *_blocks(ids, blocks))


def _begin_alike(ids: list[Any], others: list[Any]) -> bool:
    first, second = ids[:TOKENS_PER_BLOCK], others[:TOKENS_PER_BLOCK]
    return _are_integers(first) and _are_integers(second) and first == second


def _are_integers(ids: list[Any]) -> bool:
    """Whether all values are integers of Python, or bools, of which comparing tells the truth.

    A tensor of eight bits equals every integer that has the same last ones, and the sum of
    integers and anything else is no integer.
    """
    try:
        return type(sum(ids)) is int
    except Exception:  # whatever adding raises: who converts the ids says of which
        return False


def _blocks(ids: list[Any], packed: tuple[bytes, ...]) -> tuple[_Block, ...]:
    """Return blocks of ids, as far as they are plain integers, which do not change."""
    made: list[_Block] = []
    for number, part in enumerate(packed):
        own = ids[number * TOKENS_PER_BLOCK : (number + 1) * TOKENS_PER_BLOCK]
        if set(map(type, own)) != {int}:
            break
        made.append(_Block.of(own, part))
    return tuple(made)


def _shared(ids: list[Any], blocks: tuple[_Block, ...]) -> tuple[bytes, ...]:
    """Return the packed form of the blocks that ids begin with."""
    found: list[bytes] = []
    start = 0
    for block in blocks:  # one after another, so that each is read from memory once
        own = ids[start : start + TOKENS_PER_BLOCK]
        if not _are_integers(own) or own != block.ids:
            break
        if block.like_bools and {type(own[index]) for index in block.like_bools} != {int}:
            break
        found.append(block.packed)
        start += TOKENS_PER_BLOCK
    return tuple(found)
