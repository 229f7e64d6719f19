"""Replica: one of several evaluators of the same model, on a thread of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from genlm_backend.batching import Batcher, BatchPolicy
from genlm_backend.errors import BatcherClosedError, EngineDiedError, QueryDroppedError
from genlm_backend.model.result_collector import AdapterNames, ResultCollector
from genlm_backend.queries.evaluator import Evaluator, EvaluatorInfo, RestartableEvaluator
from genlm_backend.queries.query import Adapter, Query
from genlm_backend.queries.row import Row, RowCache

logger = logging.getLogger(__name__)

_PAUSES: Final = (0.0, 1.0, 5.0, 20.0)
"""Seconds to wait before each attempt to restart a dead replica."""


@final
class NotAskedError(EngineDiedError):
    """A replica died before it got a query, which ``ReplicaBatcher`` sends to another replica."""


@final
class Replica:
    """One evaluator and its batcher, which has a queue and a thread that calls the evaluator."""

    def __init__(
        self,
        number: int,
        evaluator: Evaluator,
        rows: RowCache[Row],
        adapters: AdapterNames,
        policy: BatchPolicy,
        has_died: Callable[[Replica, EngineDiedError], None],
        is_back: Callable[[int, EvaluatorInfo], None],
    ) -> None:
        self.number, self.evaluator, self.is_dead = number, evaluator, False
        self.answering = ResultCollector(evaluator, rows, adapters)
        self._has_died, self._is_back = has_died, is_back
        self._death = ""
        self._hurry = threading.Event()  # if set, restart without a pause
        self._dying = threading.Lock()  # held while ``is_dead`` changes
        name = f"replica {number}"
        self.batcher: Batcher[Query, Any] = Batcher(
            self._answers,
            policy,
            self._checked,
            name,
            self.answering.weight,
            self.answering.forward_key,
        )
        evaluator.check_cancelled = self.batcher.check_cancelled

    def _checked(self, query: Query) -> Query:
        """Return the query, or raise if the replica is dead; called under the queue's lock."""
        if self.is_dead:
            raise NotAskedError(self._death)
        return query

    def _answers(self, queries: list[Query]) -> list[Any]:
        if self.is_dead:
            raise NotAskedError(self._death)
        try:
            return self.answering.answers(queries)
        except EngineDiedError as error:
            self._dies(error)
            raise

    def open(self) -> concurrent.futures.Future[Any]:
        """Open the evaluator, unless open, on the replica's thread; return a future of its info."""
        own = self.evaluator
        return self.batcher.call_soon(lambda: own.open() if own.info is None else own.info)

    def ask(self, method: Callable[[Evaluator], Any]) -> concurrent.futures.Future[Any]:
        """Call ``method(evaluator)`` on the replica's thread, after the batches already sent."""

        def call() -> Any:
            try:
                return method(self.evaluator)
            except EngineDiedError as error:
                self._dies(error)
                raise

        return self.batcher.call_soon(call)

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> concurrent.futures.Future[Any]:
        """Load an adapter on the replica's thread; a dead replica loads it at its restart."""
        return self._change(lambda e: e.add_adapter(adapter, path), {adapter: path})

    def remove_adapter(self, adapter: Adapter) -> concurrent.futures.Future[Any]:
        """Remove an adapter, if loaded, on the replica's thread; a dead one does not reload it."""
        return self._change(lambda e: e.remove_adapter(adapter), {}, without=adapter)

    def _change(
        self,
        method: Callable[[Evaluator], None],
        added: Mapping[Adapter, str],
        without: Adapter | None = None,
    ) -> concurrent.futures.Future[Any]:
        """Call a method that changes the adapters; a dead replica changes them at its restart."""

        def change(evaluator: Evaluator) -> None:
            try:
                method(evaluator)
            except EngineDiedError as error:
                with self._dying:
                    self._note(added, without)
                self._dies(error)

        with self._dying:
            if not self.is_dead:
                return self.ask(change)
            self._note(added, without)
        done = concurrent.futures.Future[Any]()
        done.set_result(None)
        return done

    def _note(self, added: Mapping[Adapter, str], without: Adapter | None = None) -> None:
        """Update the adapters that the evaluator loads at its restart."""
        evaluator = self.evaluator
        if isinstance(evaluator, RestartableEvaluator):
            wanted = {**evaluator.adapters, **added}
            evaluator.adapters = {own: path for own, path in wanted.items() if own != without}

    # ---------------------------------------------------------------- dying

    def _dies(self, error: EngineDiedError) -> None:
        """Mark the replica dead, refuse its waiting queries, and restart it later if possible."""
        if self.is_dead:
            return
        self._has_died(self, error)  # first, or refused queries would be sent here again and again
        with self._dying:
            self._death = f"replica {self.number} had died: {error}"
            self.is_dead = True
        self.batcher.drop(NotAskedError(self._death))
        evaluator = self.evaluator
        if isinstance(evaluator, RestartableEvaluator):
            with contextlib.suppress(BatcherClosedError):
                self.batcher.call_soon(lambda: self._revive(evaluator))

    def _revive(self, evaluator: RestartableEvaluator) -> None:
        """Try to restart the replica, once after each of ``_PAUSES``, until it is alive."""
        for pause in _PAUSES:
            if not self.is_dead:
                return
            end = time.monotonic() + pause
            while time.monotonic() < end and not self._hurry.wait(0.05):
                self.batcher.check_cancelled()
            try:
                self._restart(evaluator)
            except QueryDroppedError:  # the model is being closed
                raise
            except Exception as error:  # loading a model may raise any error
                logger.warning("replica %d could not be restarted: %s", self.number, error)

    def restart(self, evaluator: RestartableEvaluator) -> concurrent.futures.Future[Any]:
        """Restart the replica without a pause, on its thread, unless it is alive again."""
        self._hurry.set()

        def restart(_: Evaluator) -> None:
            self._hurry.clear()
            if self.is_dead:
                self._restart(evaluator)

        return self.ask(restart)

    def _restart(self, evaluator: RestartableEvaluator) -> None:
        info = evaluator.restart()
        with self._dying:
            evaluator.load_adapters()  # those added during the restart
            self.is_dead = False
        self._is_back(self.number, info)

    def close(self) -> None:
        """Close the batcher, and then the evaluator."""
        self.batcher.close()
        self.evaluator.close()
