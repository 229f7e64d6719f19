"""Replica: one of several evaluators of the same model, on a thread of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

from genlm_backend.batching import Batcher, BatchPolicy
from genlm_backend.cache import RowCache
from genlm_backend.errors import AdapterError, EngineDiedError, QueryDroppedError
from genlm_backend.llm.adapters import AdapterNames
from genlm_backend.llm.answering import Answering
from genlm_backend.llm.evaluator import Evaluator, EvaluatorInfo, RestartableEvaluator
from genlm_backend.llm.query import Adapter
from genlm_backend.llm.row import Row
from genlm_backend.llm.scoring import Question

logger = logging.getLogger(__name__)

_PAUSES: Final = (0.0, 1.0, 5.0, 20.0)
"""Seconds to wait before each attempt to restart one that has died."""


@final
class Replica:
    """An evaluator, the thread that calls it, and what waits for it.

    Args:
        number: Its number among the replicas.
        evaluator: What answers; no other model's.
        rows: Where all replicas keep rows.
        adapters: The adapters that are loaded.
        policy: When a batch goes.
        counted: Called after each batch.

    Attributes:
        number: As given.
        evaluator: As given.
        answering: What the thread does with a batch.
        batcher: The queue in front of the thread.
        is_dead: Whether it has died and not been restarted.
    """

    def __init__(
        self,
        number: int,
        evaluator: Evaluator,
        rows: RowCache[Row],
        adapters: AdapterNames,
        policy: BatchPolicy,
        counted: Callable[[], None],
    ) -> None:
        self.number, self.evaluator, self.is_dead = number, evaluator, False
        self.answering = Answering(evaluator, rows, adapters)
        self._counted, self._adapters = counted, adapters
        self._missed: dict[Adapter, str] = {}  # adapters that were added while it was dead
        self._gone: set[Adapter] = set()  # and those that were removed
        self._dying = threading.Lock()  # held while it becomes alive again
        name = f"replica {number}"
        self.batcher: Batcher[Question, Any] = Batcher(
            self._answers, policy, name=name, weight=self.answering.weight
        )
        evaluator.check_wanted = self.batcher.check_wanted

    def _answers(self, questions: list[Question]) -> list[Any]:
        try:
            return self.answering.answers(questions)
        finally:
            self._counted()

    def ask(self, verb: Callable[[Evaluator], Any]) -> concurrent.futures.Future[Any]:
        """Have its thread call a verb of the evaluator, after the batches already sent."""
        return self.batcher.call_soon(lambda: self.answering.counted(lambda: verb(self.evaluator)))

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> concurrent.futures.Future[Any]:
        """Load an adapter on its thread; while it is dead, when it is restarted."""

        def add(evaluator: Evaluator) -> None:
            try:
                evaluator.add_adapter(adapter, path)
            except EngineDiedError:
                self._missed[adapter] = path

        with self._dying:
            if not self.is_dead:
                return self.ask(add)
            self._missed[adapter] = path
        return _done()

    def remove_adapter(self, adapter: Adapter) -> concurrent.futures.Future[Any]:
        """Remove an adapter on its thread, be it there or not; of a dead one, when it is back."""

        def remove(evaluator: Evaluator) -> None:
            if self._missed.pop(adapter, None) is None:
                with contextlib.suppress(EngineDiedError):
                    evaluator.remove_adapter(adapter)

        with self._dying:
            if not self.is_dead:
                return self.ask(remove)
            self._missed.pop(adapter, None)
            self._gone.add(adapter)
        return _done()

    # ---------------------------------------------------------------- dying

    def revive(self, is_back: Callable[[int, EvaluatorInfo], None]) -> None:
        """Restart it on its thread where that is possible, again and again for a while."""
        with self._dying:
            self.is_dead = True
        evaluator = self.evaluator
        if isinstance(evaluator, RestartableEvaluator):
            self.batcher.call_soon(lambda: self._revive(evaluator, is_back))

    def _revive(
        self, evaluator: RestartableEvaluator, is_back: Callable[[int, EvaluatorInfo], None]
    ) -> None:
        for pause in _PAUSES:
            if not self.is_dead:
                return
            end = time.monotonic() + pause
            while time.monotonic() < end:
                self.batcher.check_wanted()
                time.sleep(0.05)
            try:
                self.restart(evaluator, is_back)
            except QueryDroppedError:  # the model is being closed
                raise
            except Exception as error:  # whatever loading a model raises
                logger.warning("replica %d could not be restarted: %s", self.number, error)

    def restart(
        self, evaluator: RestartableEvaluator, is_back: Callable[[int, EvaluatorInfo], None]
    ) -> None:
        """Restart it, on its thread, with the adapters that it has missed."""
        info = evaluator.restart()
        with self._dying:
            for adapter, path in self._missed.items():
                try:
                    evaluator.add_adapter(adapter, path)
                except AdapterError as error:  # its files are not there any more
                    logger.warning("replica %d has no adapter %r: %s", self.number, adapter, error)
            for adapter in self._gone:
                evaluator.remove_adapter(adapter)
            self._missed.clear()
            self._gone.clear()
            self.is_dead = False
        is_back(self.number, info)

    def close(self) -> None:
        """Let go of what the evaluator holds, once its thread has ended."""
        self.batcher.close()
        self.evaluator.close()


def _done() -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(None)
    return future
