"""Roster: which drafts of an engine's requests run, and which wait. Decides only."""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, final

from genlm_backend.common_prefix import common_length
from genlm_backend.generation.generated import GenerationStatus

HEADROOM = 16
"""Tokens that must be free beyond its contexts for a draft to start or resume.

Or one that was preempted would be preempted again at its next token.
"""


class PlannedDraft(Protocol):
    """The view of a draft that the roster plans by."""

    @property
    def contexts(self) -> Sequence[list[int]]:
        """Token ids of the contexts that have to be in memory."""
        ...

    @property
    def width(self) -> int:
        """Number of rows of a batch that it takes."""
        ...

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter; contexts of different adapters share nothing."""
        ...


R = TypeVar("R", bound=Hashable)
D = TypeVar("D", bound=PlannedDraft)


class Phase(enum.Enum):
    """How far a draft has come; it is in exactly one phase."""

    WAITING = "waiting"
    """The draft has not run yet, and has no task."""
    RUNNING = "running"
    """The draft has its rows of a batch."""
    PREEMPTED = "preempted"
    """The draft has lost its rows between two tokens, and resumes when there is room again."""
    LEAVING = "leaving"
    """The draft is complete and takes no row; its task is still forgetting what it asked for."""
    CANCELLED = "cancelled"
    """The request has been settled with what the draft had; its task has yet to notice that."""
    GONE = "gone"
    """The roster has nothing more to do with the draft."""


@final
@dataclass(eq=False, slots=True)
class Entry(Generic[R, D]):
    """A draft on the roster, with its phase."""

    request: R
    draft: D
    arrival: int = 0
    phase: Phase = Phase.WAITING
    asked: Sequence[list[int]] = ()

    @property
    def is_wanted(self) -> bool:
        """Whether the draft runs or is to run."""
        return self.phase in (Phase.WAITING, Phase.RUNNING, Phase.PREEMPTED)


@final
@dataclass(slots=True)
class Plan(Generic[R, D]):
    """An admission plan: the drafts that run, and those that never can; all others wait."""

    running: list[Entry[R, D]] = field(default_factory=list)
    hopeless: list[Entry[R, D]] = field(default_factory=list)
    num_tokens: int = 0


def make_plan(entries: Iterable[Entry[R, D]], max_batch: int, capacity: int | None) -> Plan[R, D]:
    """Choose from the beginning of ``entries``, oldest first, the drafts that fit together.

    Nobody overtakes: the first one that does not fit ends the choice. So the youngest of the
    running ones is the first to be preempted when memory is short, and the first to resume.
    """
    plan = Plan[R, D]()
    num_rows = 0
    for entry in entries:
        draft = entry.draft
        if num_rows + draft.width > max_batch:
            break
        num_own = sum(map(len, draft.contexts))
        num_tokens = plan.num_tokens + num_own
        if capacity is not None:
            if num_own > capacity and _num_distinct([entry]) > capacity:
                plan.hopeless.append(entry)
                continue
            needs_room = bool(plan.running) and entry.phase is not Phase.RUNNING
            headroom = HEADROOM * draft.width if needs_room else 0
            if num_tokens + headroom > capacity:  # what they share may make the difference
                num_tokens = _num_distinct([*plan.running, entry])
            if num_tokens + headroom > capacity:
                break
        plan.running.append(entry)
        plan.num_tokens = num_tokens
        num_rows += draft.width
    return plan


def _num_distinct(entries: Iterable[Entry[R, D]]) -> int:
    """Count the tokens of all contexts, those of a shared beginning once."""
    by_adapter: dict[str | None, list[list[int]]] = defaultdict(list)
    for entry in entries:
        by_adapter[entry.draft.lora_name].extend(entry.draft.contexts)
    return sum(map(num_distinct_tokens, by_adapter.values()))


def num_distinct_tokens(contexts: Iterable[list[int]]) -> int:
    """Return how many nodes a tree of the contexts has.

    In alphabetical order, each context adds what it does not share with the one before it.
    """
    ordered = sorted(contexts)
    shared = sum(map(common_length, ordered, itertools.islice(ordered, 1, None)))
    return sum(map(len, ordered)) - shared


@final
@dataclass(frozen=True, slots=True)
class Settlement(Generic[R, D]):
    """A request that is to be settled."""

    request: R
    entries: tuple[Entry[R, D], ...]
    status: GenerationStatus
    error: Exception | None = None


@final
@dataclass(slots=True)
class RosterChange(Generic[R, D]):
    """Transitions of drafts and requests to carry out; a draft is in one of the lists at most."""

    start: list[Entry[R, D]] = field(default_factory=list)
    resume: list[Entry[R, D]] = field(default_factory=list)
    preempt: list[Entry[R, D]] = field(default_factory=list)
    cancel: list[Entry[R, D]] = field(default_factory=list)
    settle: list[Settlement[R, D]] = field(default_factory=list)


@final
class Roster(Generic[R, D]):
    """The drafts that are wanted, each in one phase: the oldest run whose contexts fit.

    Its methods change phases and return the transitions that follow, in a ``RosterChange``;
    ``None`` is returned where everybody goes on as before. There is no event loop, no lock and no
    model in it.
    """

    def __init__(
        self,
        max_batch: int,
        max_waiting: int | None,
        capacity: int | None,
        keeps_contexts: bool = True,
    ) -> None:
        self.max_batch, self.capacity = max_batch, capacity
        self.is_open = False
        self._max_waiting = max_waiting
        self._keeps_contexts = keeps_contexts
        self._requests: dict[R, tuple[Entry[R, D], ...]] = {}  # in the order of arrival
        self._num_arrivals = 0
        self._last_begun = -1
        self._num_tokens = 0  # no fewer than the distinct ones of those that run

    # ---------------------------------------------------------------- what there is

    @property
    def entries(self) -> list[Entry[R, D]]:
        """Drafts of the requests that are not settled, in the order of arrival."""
        return list(itertools.chain.from_iterable(self._requests.values()))

    @property
    def num_running(self) -> int:
        """Number of drafts that run."""
        return sum(entry.phase is Phase.RUNNING for entry in self.entries)

    @property
    def num_waiting_submissions(self) -> int:
        """Number of submissions of which nothing has begun."""
        # They begin in the order of arrival: whatever came after the last one to begin is waiting.
        return len({entry.arrival for entry in self.entries if entry.arrival > self._last_begun})

    def _wanted(self) -> Iterator[Entry[R, D]]:
        entries = itertools.chain.from_iterable(self._requests.values())
        return (entry for entry in entries if entry.is_wanted)

    # ---------------------------------------------------------------- admission

    def submit(self, requests: Mapping[R, Sequence[D]]) -> RosterChange[R, D] | None:
        """Take the requests of one submission, unless ``max_waiting`` submissions wait already.

        One whose first draft would run at once is taken even then, since it does not wait.
        """
        assert self.is_open
        arrival = self._num_arrivals
        taken = {
            request: tuple(Entry(request, draft, arrival) for draft in drafts)
            for request, drafts in requests.items()
        }
        limit = self._max_waiting
        if limit is not None and self.num_waiting_submissions >= limit:
            first = next(itertools.chain.from_iterable(taken.values()))
            plan = make_plan([*self._wanted(), first], self.max_batch, self.capacity)
            if first not in plan.running:
                return None
        self._num_arrivals += 1
        self._requests.update(taken)
        return self._replanned(RosterChange())

    # ---------------------------------------------------------------- drafts under way

    def asks(self, entry: Entry[R, D]) -> None:
        """Note that the model is asked for the contexts of a draft."""
        entry.asked = entry.draft.contexts

    def grew(self, entry: Entry[R, D]) -> RosterChange[R, D] | None:
        """Note that a draft has one token more in each context, and goes on."""
        self._num_tokens += entry.draft.width
        if self.capacity is None or self._num_tokens <= self.capacity:
            return None
        return self._replanned(RosterChange())

    def finished(self, entry: Entry[R, D]) -> None:
        """Note that a draft is complete, before it has left."""
        entry.phase = Phase.LEAVING

    def noticed(self, entry: Entry[R, D]) -> None:
        """Note that a draft's task asks for nothing more, so that nobody has to cancel it."""
        if entry.phase is Phase.CANCELLED:
            entry.phase = Phase.GONE

    def left(self, entry: Entry[R, D]) -> RosterChange[R, D] | None:
        """Note that a draft's task has nothing more to do; the last one finishes its request."""
        if entry.phase is not Phase.LEAVING:
            return None
        entry.phase = Phase.GONE
        change, entries = RosterChange[R, D](), self._requests[entry.request]
        if all(other.phase is Phase.GONE for other in entries):
            del self._requests[entry.request]
            change.settle.append(Settlement(entry.request, entries, GenerationStatus.FINISHED))
        return self._replanned(change)

    # ---------------------------------------------------------------- ending

    def ended(
        self, request: R, status: GenerationStatus, error: Exception | None = None
    ) -> RosterChange[R, D] | None:
        """End a request; one whose drafts are all complete, or that has ended, stays as it is."""
        change = RosterChange[R, D]()
        self._take_off(change, request, status, error)
        return self._replanned(change) if change.settle else None

    def close(self) -> RosterChange[R, D]:
        """Let no more requests in and interrupt those that there are."""
        self.is_open = False
        change = RosterChange[R, D]()
        for request in list(self._requests):
            self._take_off(change, request, GenerationStatus.INTERRUPTED)
        return change

    def _take_off(
        self,
        change: RosterChange[R, D],
        request: R,
        status: GenerationStatus,
        error: Exception | None = None,
    ) -> None:
        entries = self._requests.get(request, ())
        if all(entry.phase in (Phase.LEAVING, Phase.GONE) for entry in entries):
            return
        del self._requests[request]
        change.settle.append(Settlement(request, entries, status, error))
        for entry in entries:
            if entry.phase in (Phase.RUNNING, Phase.PREEMPTED):
                entry.phase = Phase.CANCELLED
                change.cancel.append(entry)
            else:  # without a task, or with one that is to forget what it asked for
                entry.phase = Phase.GONE

    # ---------------------------------------------------------------- who runs

    def _replanned(self, change: RosterChange[R, D]) -> RosterChange[R, D]:
        """Start, resume and preempt drafts by a new plan, and end requests that never can run."""
        while (plan := make_plan(self._wanted(), self.max_batch, self.capacity)).hopeless:
            for request in dict.fromkeys(entry.request for entry in plan.hopeless):
                self._take_off(change, request, GenerationStatus.INTERRUPTED)
        self._num_tokens = plan.num_tokens
        # Those that ran follow one another, from the oldest on: nobody has overtaken.
        for entry in itertools.islice(self._wanted(), len(plan.running), None):
            if entry.phase is not Phase.RUNNING:
                break
            entry.phase = Phase.PREEMPTED
            change.preempt.append(entry)
        for entry in plan.running:
            if entry.phase is Phase.WAITING:
                change.start.append(entry)
                self._last_begun = entry.arrival
            elif entry.phase is Phase.PREEMPTED:
                change.resume.append(entry)
            entry.phase = Phase.RUNNING
        return change

    # ---------------------------------------------------------------- without a prefix cache

    def left_behind(self, entry: Entry[R, D]) -> list[list[int]]:
        """Return the contexts of a draft that are not to stay in memory for itself.

        A draft that goes on leaves behind what it asked for and has given up; another one leaves
        all of its contexts.
        """
        if self._keeps_contexts:
            return []
        contexts = entry.draft.contexts
        if not entry.is_wanted:
            return [*entry.asked, *contexts]
        if entry.draft.width == 1:  # what was asked for has only become longer
            return []
        return [context for context in entry.asked if context not in contexts]

    def num_needed(self, context: Sequence[int], lora_name: str | None) -> int:
        """Return how many leading tokens of a context stay, as drafts that go on need them."""
        return max(
            (
                common_length(context, needed)
                for entry in self._wanted()
                if entry.asked and entry.draft.lora_name == lora_name
                for needed in entry.draft.contexts
            ),
            default=0,
        )
