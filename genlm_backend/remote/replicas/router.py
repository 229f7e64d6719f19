"""Router: which of several replicas answers a context soonest; pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, final

from genlm_backend.remote.replicas.sent_tree import Match, SentTree

_PER_REPEATED: Final = 4.0
"""Weight of a token that is computed on one more replica, beside one that waits.

A compromise, found by simulating 10,000 particles on 64 replicas that are resampled: with less,
more tokens are computed again and again; with more, replicas wait longer for the slowest.
"""


@final
@dataclass(slots=True, eq=False)
class Load:
    """Pending work of a replica: what waits there or is being computed."""

    num_contexts: int = 0
    num_tokens: int = 0
    is_alive: bool = True


@final
@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A replica for a context."""

    replica: int
    num_new: int
    load: Load
    space: Hashable
    packed: bytes


@final
class Router:
    """Sends each context to the replica that answers it soonest.

    The time is counted in tokens: those that wait at the replica, those of the context that it was
    not sent before, and ``per_forward`` for each forward pass until the answer, which takes
    ``batch_size`` contexts. What a replica was not sent counts ``_PER_REPEATED`` times, since
    others wait for it too that come later; and tokens that many contexts share, a prompt's, are an
    expense that each has a part in. So contexts go on where their prefixes are, unless much more
    waits there than elsewhere; and a group that has one prompt is parted once the queue in front of
    it costs more than its part in computing the prompt a second time.
    """

    def __init__(
        self, capacities: Sequence[int | None], batch_size: int = 20, per_forward: float = 8.0
    ) -> None:
        self.batch_size, self._per_forward = batch_size, per_forward
        self.loads = [Load() for _ in capacities]
        self._sent = SentTree(capacities)

    @property
    def is_alive(self) -> bool:
        """Whether any replica is."""
        return any(load.is_alive for load in self.loads)

    def choose(self, space: Hashable, packed: bytes) -> Choice:
        """Send a context, 32-bit token ids, to a replica; at least one has to be alive."""
        matches = self._sent.matches(space, packed)
        costs = [
            (self._wait(load, match) + _PER_REPEATED * match.part, replica)
            for replica, (load, match) in enumerate(zip(self.loads, matches, strict=True))
            if load.is_alive
        ]
        _, replica = min(costs)
        num_new = max(1, len(packed) // 4 - matches[replica].num_known)
        choice = Choice(replica, num_new, self.loads[replica], space, packed)
        choice.load.num_contexts += 1
        choice.load.num_tokens += choice.num_new
        self._sent.add(space, packed, replica)
        return choice

    def _wait(self, load: Load, match: Match) -> float:
        """Return the time that a context waits; its own tokens would take as long anywhere."""
        num_passes = 1 + load.num_contexts // self.batch_size
        return load.num_tokens - match.num_waiting + self._per_forward * num_passes

    def ended(self, choice: Choice) -> None:
        """Take note that a context that was sent has been answered, or is waited for no more."""
        choice.load.num_contexts -= 1
        choice.load.num_tokens -= choice.num_new
        self._sent.answered(choice.space, choice.packed, choice.replica)

    def lost(self, replica: int) -> None:
        """Send nothing to a replica any more, which has nothing any more."""
        self.loads[replica] = Load(is_alive=False)
        self._sent.forget(replica)

    def back(self, replica: int) -> None:
        """Send contexts to a replica again."""
        self.loads[replica].is_alive = True

    def sent_to_all(self, space: Hashable, packed: bytes) -> None:
        """Take note that all replicas have computed a context."""
        for replica, load in enumerate(self.loads):
            if load.is_alive:
                self._sent.add(space, packed, replica)
                self._sent.answered(space, packed, replica)

    def cleared(self) -> None:
        """Take note that no replica has anything."""
        self._sent.clear()
