"""Places: which of the texts that are wanted fit into batch and memory. Decides only."""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, final

from genlm_backend.common_prefix import common_length

HEADROOM = 16
"""Tokens that must be free beyond its context for a text to begin, or to go on after a rest.

Or one that was preempted would be preempted again at its next token.
"""


class Work(Protocol):
    """The view of a draft that the roster plans by."""

    @property
    def contexts(self) -> Sequence[list[int]]:
        """Token ids of the contexts that have to be in memory."""
        ...

    @property
    def width(self) -> int:
        """Number of places of a batch that it takes."""
        ...

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter; contexts of different adapters share nothing."""
        ...


R = TypeVar("R", bound=Hashable)
D = TypeVar("D", bound=Work)


class Phase(enum.Enum):
    """How far a text has come; it is in exactly one phase."""

    WAITING = "waiting"
    """The text has had no place so far, and no task."""
    RUNNING = "running"
    """The text has a place."""
    RESTING = "resting"
    """The text has lost its place between two tokens, and goes on when there is one again."""
    LEAVING = "leaving"
    """The text is complete and takes no place; its task is still forgetting what it asked for."""
    CANCELLED = "cancelled"
    """The request has been settled with what the text had; its task has yet to notice that."""
    GONE = "gone"
    """The roster has nothing more to do with the text."""


@final
@dataclass(eq=False, slots=True)
class Entry(Generic[R, D]):
    """A text of a request, as it stands on the roster.

    Attributes:
        request: The request that the text belongs to.
        draft: What makes the text.
        arrival: Number of the submission that it came with.
        phase: How far the text has come.
        asked: The contexts that the model was asked for last; empty until the first.
    """

    request: R
    draft: D
    arrival: int = 0
    phase: Phase = Phase.WAITING
    asked: Sequence[list[int]] = ()

    @property
    def is_wanted(self) -> bool:
        """Whether the text has a place or is to get one."""
        return self.phase in (Phase.WAITING, Phase.RUNNING, Phase.RESTING)


@final
@dataclass(slots=True)
class Plan(Generic[R, D]):
    """An admission plan: the texts that run, and those that never can; all others wait.

    Attributes:
        running: Texts that may run, in order.
        hopeless: Texts that do not fit alone.
        num_tokens: A bound of the number of distinct tokens of the running ones' contexts.
    """

    running: list[Entry[R, D]] = field(default_factory=list)
    hopeless: list[Entry[R, D]] = field(default_factory=list)
    num_tokens: int = 0


def make_plan(texts: Iterable[Entry[R, D]], max_batch: int, capacity: int | None) -> Plan[R, D]:
    """Choose from the beginning of ``texts``, oldest first, whoever fits into batch and memory.

    Nobody overtakes: the first one that does not fit ends the choice. So the youngest of the
    running ones is the first to rest when memory is short, and the first to go on afterwards.

    Args:
        texts: Texts in the order of arrival.
        max_batch: Places of a batch.
        capacity: Tokens that fit into memory; ``None`` for no bound.
    """
    plan = Plan[R, D]()
    num_places = 0
    for text in texts:
        draft = text.draft
        if num_places + draft.width > max_batch:
            break
        num_own = sum(map(len, draft.contexts))
        num_tokens = plan.num_tokens + num_own
        if capacity is not None:
            if num_own > capacity and _num_distinct([text]) > capacity:
                plan.hopeless.append(text)
                continue
            needs_room = bool(plan.running) and text.phase is not Phase.RUNNING
            headroom = HEADROOM * draft.width if needs_room else 0
            if num_tokens + headroom > capacity:  # what they share may make the difference
                num_tokens = _num_distinct([*plan.running, text])
            if num_tokens + headroom > capacity:
                break
        plan.running.append(text)
        plan.num_tokens = num_tokens
        num_places += draft.width
    return plan


def _num_distinct(texts: Iterable[Entry[R, D]]) -> int:
    """Count the tokens of all contexts, those of a shared beginning once."""
    by_adapter: dict[str | None, list[list[int]]] = defaultdict(list)
    for text in texts:
        by_adapter[text.draft.lora_name].extend(text.draft.contexts)
    return sum(map(num_distinct_tokens, by_adapter.values()))


def num_distinct_tokens(contexts: Iterable[list[int]]) -> int:
    """Return how many nodes a tree of the contexts has.

    In alphabetical order, each context adds what it does not share with the one before it.
    """
    ordered = sorted(contexts)
    shared = sum(map(common_length, ordered, itertools.islice(ordered, 1, None)))
    return sum(map(len, ordered)) - shared
