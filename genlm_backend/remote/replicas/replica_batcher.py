"""ReplicaBatcher: sends each query to a replica, and to another replica if the first one dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, final

from genlm_backend.batching import Batcher, BatcherStatistics, BatchPolicy
from genlm_backend.errors import EngineDiedError
from genlm_backend.model.result_collector import AdapterNames
from genlm_backend.queries.evaluator import Evaluator, EvaluatorInfo
from genlm_backend.queries.query import Query
from genlm_backend.queries.row import Row, RowCache
from genlm_backend.remote.replicas.replica import NotAskedError, Replica
from genlm_backend.remote.replicas.router import Choice, Router
from genlm_backend.runtime.background_loop import BackgroundLoop
from genlm_backend.runtime.together import together

_MOST_DEATHS: Final = 3
"""A query's caller gets the error once replicas have died this often while computing the query."""


@final
class ReplicaBatcher(Batcher[Query, Any]):
    """Sends each query to the replica that ``Router`` expects to answer it soonest."""

    def __init__(
        self,
        evaluators: Sequence[Evaluator],
        rows: RowCache[Row],
        adapters: AdapterNames,
        policy: BatchPolicy,
        name: str,
        is_back: Callable[[int, EvaluatorInfo], None],
    ) -> None:
        super().__init__(list, policy, name=name)  # the inherited queue stays unused
        self.replicas = [
            Replica(number, evaluator, rows, adapters, policy, self.died, self.back)
            for number, evaluator in enumerate(evaluators)
        ]
        self._is_back = is_back
        self._router = Router([None] * len(evaluators), policy.max_batch_size)
        self._asked: dict[Query, tuple[Choice, int]] = {}
        self._left: deque[tuple[Query, Choice]] = deque()  # one per caller that waits no more
        self._last_death = "no replica is alive"
        self._loop: BackgroundLoop | None = None  # made by the first blocking call

    def opened(self, infos: list[EvaluatorInfo], per_forward: float) -> None:
        """Make the router for the replicas, which cache ``info.num_slots`` tokens each."""
        capacities = [info.num_slots or 0 for info in infos]  # with 0, nothing counts as cached
        self._router = Router(capacities, self.policy.max_batch_size, per_forward)

    # ---------------------------------------------------------------- asking

    async def submit(self, query: Query) -> Any:
        num_deaths = 0
        while True:
            choice = self._send(query)
            try:
                answer = await self.replicas[choice.replica].batcher.submit(query)
            except GeneratorExit:  # raised in garbage collection; this thread may hold the lock
                self._left.append((query, choice))
                raise
            except NotAskedError:
                self._ended(query, choice)
            except EngineDiedError:
                self._ended(query, choice)
                num_deaths += 1
                if num_deaths == _MOST_DEATHS:
                    raise
            except BaseException:
                self._ended(query, choice)
                raise
            else:
                self._ended(query, choice)
                return answer

    async def submit_all(self, queries: Iterable[Query]) -> list[Any]:
        return await together(map(self.submit, queries))

    def submit_sync(self, queries: Iterable[Query]) -> list[Any]:
        with self._lock.here:
            self.check_open()
            self._loop = loop = self._loop or BackgroundLoop(self._name)
        wanted = list(queries)
        distinct = list(dict.fromkeys(wanted))
        found = dict(zip(distinct, loop.run(self.submit_all(distinct)), strict=True))
        return [found[query] for query in wanted]

    def _send(self, query: Query) -> Choice:
        self.check_open()
        with self._lock.here:
            self._note_left()
            if not self._router.is_alive:
                raise EngineDiedError(self._last_death)
            choice, count = self._asked.get(query, (None, 0))
            if choice is None or self._router.loads[choice.replica] is not choice.load:
                choice, count = self._router.choose(query.adapter, _packed(query)), 0
            self._asked[query] = choice, count + 1
            return choice

    def _ended(self, query: Query, choice: Choice) -> None:
        self._left.append((query, choice))
        with self._lock.here:
            self._note_left()

    def _note_left(self) -> None:
        """Empty ``_left``; a query leaves its replica's load once its last caller stops waiting."""
        while self._left:
            query, choice = self._left.popleft()
            own, count = self._asked.get(query, (None, 0))
            if own is not choice:  # it has been sent to another replica
                continue
            if count > 1:
                self._asked[query] = choice, count - 1
            else:
                del self._asked[query]
                self._router.ended(choice)

    # ---------------------------------------------------------------- dying

    def died(self, replica: Replica, error: EngineDiedError) -> None:
        """Stop routing to a replica that has died, before it refuses any query."""
        with self._lock.here:
            self._router.lost(replica.number)
            self._last_death = f"no replica is alive; the last error: {error}"

    def back(self, number: int, info: EvaluatorInfo) -> None:
        with self._lock.here:
            self._router.back(number)
        self._is_back(number, info)

    @property
    def num_alive(self) -> int:
        """Number of replicas that are alive; 0 once the batcher is closed."""
        return 0 if self.is_closed else sum(load.is_alive for load in self._router.loads)

    def sent_to_all(self, query: Query) -> None:
        with self._lock.here:
            self._router.sent_to_all(query.adapter, _packed(query))

    def cleared(self) -> None:
        """Tell the router that all caches are empty."""
        with self._lock.here:
            self._router.cleared()

    # ---------------------------------------------------------------- as a Batcher

    def set_policy(self, **fields: Any) -> None:
        policy = replace(self.policy, **fields)
        for replica in self.replicas:
            replica.batcher.set_policy(**fields)
        with self._lock.here:
            self.policy, self._router.batch_size = policy, policy.max_batch_size

    def flush(self) -> None:
        for replica in self.replicas:
            replica.batcher.flush()

    def drain(self) -> None:
        for replica in self.replicas:
            replica.batcher.drain()

    def drop(self, reason: str | Exception = "the query was dropped before it was answered") -> int:
        return sum(replica.batcher.drop(reason) for replica in self.replicas)

    def statistics(self) -> BatcherStatistics:
        return BatcherStatistics.sum([replica.batcher.statistics() for replica in self.replicas])

    def close(self) -> None:
        for replica in self.replicas:
            replica.batcher.close()
        with self._lock.here:
            self._is_closed, loop = True, self._loop
        self._worker.stop()
        if loop is not None:
            loop.close()


def _packed(query: Query) -> bytes:
    blocks, rest = query.context.key
    return b"".join((*blocks, rest))
