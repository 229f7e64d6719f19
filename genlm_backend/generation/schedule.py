"""Which of the texts that are wanted are worked at, given the memory there is. Decides only."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

HEADROOM = 16
"""Tokens that must be free beyond its context for a text to begin, or to go on after a rest.

Or one that was preempted would be preempted again at its next token.
"""


class Work(Protocol):
    """A text that is wanted, as the plan sees it."""

    @property
    def is_running(self) -> bool:
        """Whether it is worked at now."""
        ...

    @property
    def contexts(self) -> Sequence[list[int]]:
        """What has to be in memory."""
        ...

    @property
    def width(self) -> int:
        """Places of a batch that it takes."""
        ...

    @property
    def lora_name(self) -> str | None:
        """Contexts of different adapters share nothing."""
        ...


W = TypeVar("W", bound=Work)


@dataclass(slots=True)
class Plan(Generic[W]):
    """Who works and who gives up; everybody else waits.

    Attributes:
        running: Those that may go on, in order.
        hopeless: Those that do not fit alone.
        num_tokens: No fewer than the distinct tokens of the running ones' contexts.
    """

    running: list[W] = field(default_factory=list)
    hopeless: list[W] = field(default_factory=list)
    num_tokens: int = 0


def make_plan(work: Iterable[W], max_batch: int, capacity: int | None) -> Plan[W]:
    """Choose from the beginning of ``work``, oldest first, whoever fits into batch and memory.

    Nobody overtakes: the first one that does not fit ends the choice. So the youngest of the
    running ones is the first to rest when memory is short, and the first to go on afterwards.

    Args:
        work: In the order of arrival.
        max_batch: Places of a batch.
        capacity: Tokens that fit into memory; ``None`` for no bound.
    """
    plan: Plan[W] = Plan()
    num_places = 0
    for item in work:
        if num_places + item.width > max_batch:
            break
        num_own = sum(map(len, item.contexts))
        num_tokens = plan.num_tokens + num_own
        if capacity is not None:
            if num_own > capacity and _num_distinct([item]) > capacity:
                plan.hopeless.append(item)
                continue
            headroom = 0 if item.is_running or not plan.running else HEADROOM * item.width
            if num_tokens + headroom > capacity:  # what they share may make the difference
                num_tokens = _num_distinct([*plan.running, item])
            if num_tokens + headroom > capacity:
                break
        plan.running.append(item)
        plan.num_tokens = num_tokens
        num_places += item.width
    return plan


def _num_distinct(work: Sequence[Work]) -> int:
    """Count the tokens of all contexts, those of a shared beginning once."""
    by_adapter: dict[str | None, list[list[int]]] = defaultdict(list)
    for item in work:
        by_adapter[item.lora_name].extend(item.contexts)
    return sum(map(num_distinct_tokens, by_adapter.values()))


def num_distinct_tokens(contexts: Iterable[list[int]]) -> int:
    """Return how many nodes a tree of the contexts has.

    In alphabetical order, each context adds what it does not share with the one before it.
    """
    ordered = sorted(contexts)
    shared = sum(map(num_shared, ordered, itertools.islice(ordered, 1, None)))
    return sum(map(len, ordered)) - shared


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens two contexts share."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    return int((np.array(first[:size]) != np.array(second[:size])).argmax())
