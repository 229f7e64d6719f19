"""Distributor: what asks a replica, and another one if that dies."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar, final

from genlm_backend.batching import Batcher, BatcherStatistics, BatchPolicy
from genlm_backend.batching.call import Call
from genlm_backend.errors import EngineDiedError
from genlm_backend.llm.evaluator import EvaluatorInfo
from genlm_backend.llm.replicas.replica import Replica
from genlm_backend.llm.replicas.router import Choice, Router
from genlm_backend.llm.scoring import Question
from genlm_backend.process_lock import ProcessLock

T = TypeVar("T")

_MOST_DEATHS: Final = 3
"""Replicas that may die with a question before it is the one that gets the error."""


class _Sent(NamedTuple):
    """A question, and where it was sent."""

    query: Question
    choice: Choice


@final
class Distributor:
    """Sends each question to the replica that answers it soonest, by what ``Router`` knows.

    It is asked as a ``Batcher`` is. What is not a question runs on a thread of its own, and asks
    all replicas.

    Args:
        replicas: The replicas, which are opened later.
        policy: When a batch goes, for each of them.
        name: What errors call it.
        is_back: Called with what a replica is able to do that has been restarted.
    """

    def __init__(
        self,
        replicas: list[Replica],
        policy: BatchPolicy,
        name: str,
        is_back: Callable[[int, EvaluatorInfo], None],
    ) -> None:
        self._replicas, self._is_back = replicas, is_back
        self._control: Batcher[Any, Any] = Batcher(list, policy, name=name)
        self._lock = ProcessLock()
        self._router = Router([None] * len(replicas), policy.max_batch_size)
        self._asked: dict[Question, tuple[Choice, int]] = {}
        self._last_death = EngineDiedError("no replica is alive")

    def opened(self, infos: list[EvaluatorInfo], per_forward: float) -> None:
        """Begin to send questions to replicas that keep so many tokens."""
        capacities = [info.num_slots for info in infos]
        self._router = Router(capacities, self.policy.max_batch_size, per_forward)

    # ---------------------------------------------------------------- asking

    async def submit(self, query: Question) -> Any:
        """Return the answer to ``query``; see ``Batcher``.

        Raises:
            EngineDiedError: If no replica is alive, or several have died with the query.
        """
        for is_last in (False,) * (_MOST_DEATHS - 1) + (True,):
            choice = self._send(query)
            try:
                return await self._replicas[choice.replica].batcher.submit(query)
            except EngineDiedError as error:
                self._died(choice, error)
                if is_last:
                    raise
            finally:
                self._ended(query, choice)
        raise AssertionError

    def submit_sync(self, queries: Iterable[Question]) -> list[Any]:
        """Return the answers to ``queries``, blocking this thread; see ``Batcher``."""
        wanted = list(queries)
        missing, answers = list(dict.fromkeys(wanted)), {}
        for is_last in (False,) * (_MOST_DEATHS - 1) + (True,):
            sent: list[_Sent] = []
            try:
                sent.extend(_Sent(query, self._send(query)) for query in missing)
                error = self._ask(sent, answers)
            finally:
                for query, choice in sent:
                    self._ended(query, choice)
            missing = [query for query in missing if query not in answers]
            if error is not None and (is_last or not missing):
                raise error
            if not missing:
                break
        return [answers[query] for query in wanted]

    def _ask(self, sent: list[_Sent], answers: dict[Question, Any]) -> EngineDiedError | None:
        """Ask replicas at once, all but one on other threads; return the error of one that died."""

        def ask(number: int) -> None:
            questions = [query for query, choice in sent if choice.replica == number]
            found = self._replicas[number].batcher.submit_sync(questions)
            answers.update(zip(questions, found, strict=True))

        choices = {choice.replica: choice for _, choice in sent}
        if not choices:
            return None
        own, *others = choices
        death = None
        with concurrent.futures.ThreadPoolExecutor(max(1, len(others))) as threads:
            asked = {number: threads.submit(ask, number) for number in others}
            call = Call(lambda: ask(own))
            call.run()
            asked[own] = call.future
        for number, future in asked.items():
            error = future.exception()
            if isinstance(error, EngineDiedError):
                self._died(choices[number], error)
                death = error
            elif error is not None:
                raise error
        return death

    def _send(self, query: Question) -> Choice:
        self.check_open()
        with self._lock.here:
            if not self._router.is_alive:
                raise self._last_death
            choice, count = self._asked.get(query, (None, 0))
            if choice is None or not self._router.loads[choice.replica].is_alive:
                choice, count = self._router.choose(query.adapter, _packed(query)), 0
            self._asked[query] = choice, count + 1
            return choice

    def _ended(self, query: Question, choice: Choice) -> None:
        with self._lock.here:
            own, count = self._asked.get(query, (None, 0))
            if own is not choice:  # it was sent elsewhere meanwhile
                return
            if count > 1:
                self._asked[query] = choice, count - 1
                return
            del self._asked[query]
            self._router.ended(choice)

    # ---------------------------------------------------------------- dying

    def _died(self, choice: Choice, error: EngineDiedError) -> None:
        with self._lock.here:
            if self._router.loads[choice.replica] is not choice.load:  # which is known already
                return
            self._router.lost(choice.replica)
            self._last_death = EngineDiedError(f"no replica is alive; the last one: {error}")
        self._replicas[choice.replica].revive(self.back)

    def back(self, number: int, info: EvaluatorInfo) -> None:
        """Take note that a replica has been restarted."""
        with self._lock.here:
            self._router.back(number)
        self._is_back(number, info)

    @property
    def num_alive(self) -> int:
        """Number of replicas that answer."""
        return sum(load.is_alive for load in self._router.loads)

    def sent_to_all(self, query: Question) -> None:
        """Take note that all replicas have computed a context."""
        with self._lock.here:
            self._router.sent_to_all(query.adapter, _packed(query))

    def cleared(self) -> None:
        """Take note that no replica has keys and values of anything."""
        with self._lock.here:
            self._router.cleared()

    # ---------------------------------------------------------------- as a Batcher

    @property
    def policy(self) -> BatchPolicy:
        """When a batch goes, on each replica."""
        return self._control.policy

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that it belongs to."""
        return self._control.is_foreign

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on a thread that calls no replica; block for it."""
        return self._control.call(function)

    def call_soon(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run ``function`` on a thread that calls no replica."""
        return self._control.call_soon(function)

    def check_open(self) -> None:
        """Raise what a question that is asked now would raise at once."""
        self._control.check_open()

    def check_wanted(self) -> None:
        """Raise if nobody waits any more for what the calling thread is doing."""
        self._control.check_wanted()

    def set_policy(self, **fields: Any) -> None:
        """Replace fields of the policy of every replica."""
        self._control.set_policy(**fields)
        for replica in self._replicas:
            replica.batcher.set_policy(**fields)
        with self._lock.here:
            self._router.batch_size = self.policy.max_batch_size

    def flush(self) -> None:
        """Let everything that waits go now, on every replica."""
        for replica in self._replicas:
            replica.batcher.flush()

    def drop(self, reason: str = "the query was dropped before it was answered") -> int:
        """Settle every waiter with a ``QueryDroppedError``; return how many there were."""
        return sum(replica.batcher.drop(reason) for replica in self._replicas)

    def statistics(self) -> BatcherStatistics:
        """Return the counts of all replicas."""
        return BatcherStatistics.sum([replica.batcher.statistics() for replica in self._replicas])

    def close(self) -> None:
        """Drop everybody and end; again has no effect."""
        for replica in self._replicas:
            replica.batcher.close()
        self._control.close()


def _packed(query: Question) -> bytes:
    return query.context.packed().tobytes()
