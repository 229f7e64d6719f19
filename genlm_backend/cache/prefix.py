"""PrefixCache: which prefixes of a context have slots already."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(slots=True, eq=False)
class Match:
    """A locked cached prefix of one context; valid until it is released or inserted below.

    Attributes:
        slots: One slot for each token of the prefix, in order.
        node: The tree node at which the prefix ends; the cache's own.
    """

    slots: Sequence[int]
    node: Any = field(default=None, repr=False)
    is_released: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the context that need not be computed."""
        return len(self.slots)


class PrefixCache(abc.ABC):
    """Who owns which slot, by context. See the README beside this file for the protocol."""

    @abc.abstractmethod
    def match(self, token_ids: Sequence[int], namespace: Hashable = None) -> Match:
        """Lock and return the longest cached prefix of ``token_ids``.

        ``namespace`` separates contexts whose keys and values differ for equal tokens, such as
        those of different adapters. The cost grows with the tokens of the prefix.
        """

    @abc.abstractmethod
    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` slots, evicting what is old and unlocked; ``None`` if there is no room."""

    @abc.abstractmethod
    def insert(self, match: Match, token_ids: Sequence[int], slots: Sequence[int]) -> Match:
        """Put ``token_ids`` and their filled ``slots`` below ``match``; return the longer match.

        The given match is spent. Slots for tokens that the tree has by now are returned to the
        pool. Where the match has become stale by ``clear()``, all of them are.
        """

    @abc.abstractmethod
    def release(self, match: Match) -> None:
        """Unlock ``match``; releasing it again has no effect."""

    @abc.abstractmethod
    def free(self, slots: Sequence[int]) -> None:
        """Return slots that were allocated and not inserted."""

    @abc.abstractmethod
    def pin(self, match: Match) -> None:
        """Keep ``match`` locked until ``clear()``; the match is spent."""

    @abc.abstractmethod
    def evict(self, count: int) -> int:
        """Free up to ``count`` unlocked slots, least recently used first; return how many."""

    @abc.abstractmethod
    def peek(self, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Return how many of the first tokens are cached; locks nothing and changes no age."""

    @abc.abstractmethod
    def forget(self, token_ids: Sequence[int], namespace: Hashable = None, keep: int = 0) -> int:
        """Free the unlocked slots of a context beyond its first ``keep`` tokens; return how many.

        What another cached context shares with it stays.
        """

    @abc.abstractmethod
    def clear(self) -> None:
        """Unpin everything and free all that no evaluation under way has locked."""

    @abc.abstractmethod
    def check_integrity(self, held: Sequence[int] = ()) -> None:
        """Count every slot and lock; ``held`` are slots allocated and not yet inserted.

        Raises:
            CacheError: If a slot has no owner or two, or a lock count is wrong.
        """

    num_evicted: int = 0
    """Slots evicted to make room so far."""

    @property
    @abc.abstractmethod
    def num_slots(self) -> int:
        """Slots there are."""

    @property
    @abc.abstractmethod
    def num_used(self) -> int:
        """Slots that hold tokens, or that an evaluation has allocated."""

    @property
    @abc.abstractmethod
    def num_pinned(self) -> int:
        """Matches pinned since the last ``clear()``."""


_EMPTY: Final[tuple[int, ...]] = ()


class NullPrefixCache(PrefixCache):
    """Caches nothing: every context is computed whole, and no slot exists."""

    def match(self, token_ids: Sequence[int], namespace: Hashable = None) -> Match:
        """Return the empty match."""
        return Match(_EMPTY)

    def allocate(self, count: int) -> list[int] | None:
        """Return ``None``, or no slots where none are asked for."""
        return [] if count == 0 else None

    def insert(self, match: Match, token_ids: Sequence[int], slots: Sequence[int]) -> Match:
        """Forget everything."""
        return match

    def release(self, match: Match) -> None:
        """Mark ``match`` as spent."""
        match.is_released = True

    def free(self, slots: Sequence[int]) -> None:
        """Do nothing: there are no slots."""

    def pin(self, match: Match) -> None:
        """Mark ``match`` as spent; there is nothing to keep."""
        match.is_released = True

    def evict(self, count: int) -> int:
        """Return 0."""
        return 0

    def peek(self, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Return 0."""
        return 0

    def forget(self, token_ids: Sequence[int], namespace: Hashable = None, keep: int = 0) -> int:
        """Return 0."""
        return 0

    def clear(self) -> None:
        """Do nothing."""

    def check_integrity(self, held: Sequence[int] = ()) -> None:
        """Do nothing: there is nothing to count."""

    @property
    def num_slots(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_used(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_pinned(self) -> int:
        """Always 0."""
        return 0
