"""RemoteEvaluator: forwards an evaluator's methods to another process or actor."""

from __future__ import annotations

import abc
import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from genlm_backend.errors import AdapterError, EngineDiedError
from genlm_backend.multimodal.pictures import PictureRules
from genlm_backend.prefix.budgets import TierName
from genlm_backend.queries.evaluator import EvaluatorCounts, EvaluatorInfo, RestartableEvaluator
from genlm_backend.queries.query import Adapter, Query, Result, RowQuery
from genlm_backend.queries.row import Row
from genlm_backend.readouts.readout import answers_by_rows, is_own
from genlm_backend.remote.arguments import ArgumentEncoder
from genlm_backend.remote.messages import PackedError, PackedResults, Reply, RowRef
from genlm_backend.runtime.threads import frequent_switches

logger = logging.getLogger(__name__)


class RemoteEvaluator(RestartableEvaluator):
    """Forwards calls to a remote evaluator, and reloads its adapters after a restart."""

    def __init__(self) -> None:
        self.adapters: Mapping[Adapter, str] = {}
        self._loaded: set[Adapter] = set()
        # Adapters that could not be reloaded, and why.
        self._lost: dict[Adapter | None, str] = {}
        self._counts = EvaluatorCounts()
        self._sent_ids: tuple[int, ...] = ()
        self._sender = ArgumentEncoder()

    @final
    def ask(self, method: str, *arguments: Any) -> Any:
        if method != "open" and self._sent_ids != self.undefined_ids:
            self._sent_ids = self.undefined_ids
            self.ask("undefined_ids", self.undefined_ids)
        self._check_alive()
        reply = self._sender.ask(method, arguments, lambda packed: self._reply(method, packed))
        self._counts = reply.counts or self._counts
        if reply.error is not None:
            raise reply.error.error()
        return reply.value

    @abc.abstractmethod
    def _check_alive(self) -> None:
        """Raise an ``EngineDiedError`` if there is no process or actor to call."""

    @abc.abstractmethod
    def _reply(self, method: str, packed: bytes) -> Reply:
        """Send a method's name and its pickled arguments; return the reply."""

    @abc.abstractmethod
    def _started(self) -> Any:
        """Start the process or actor if necessary, open the evaluator; return its info."""

    @abc.abstractmethod
    def _end(self, is_kind: bool) -> None:
        """End the process or actor; before a restart (not ``is_kind``), a living actor is kept."""

    @abc.abstractmethod
    def _tables(self, num_rows: int, width: int) -> Iterator[torch.Tensor]:
        """Yield the rows of the latest batch as copied tables, ``[n, width]`` each."""

    # ---------------------------------------------------------------- beginning and ending

    @final
    def open(self) -> EvaluatorInfo:
        self._sent_ids, self._sender = (), ArgumentEncoder()
        try:
            info = self._started()
        except BaseException:
            self._end(True)
            raise
        if not isinstance(info, EvaluatorInfo):
            return info  # the caller raises an error
        is_here = not (info.device or "").startswith("cuda") or torch.cuda.is_available()
        device = info.device if is_here else None
        # OpenMP threads run only in the other process; ``evaluate`` can answer all readouts.
        return replace(info, uses_openmp=False, reads_out=True, device=device)

    @final
    def restart(self) -> EvaluatorInfo:
        self._end(False)
        info = self.open()
        self._loaded.clear()
        self._lost.clear()
        self.load_adapters()
        return info

    @final
    def close(self) -> None:
        self._end(True)
        self._counts = replace(self._counts, kv_bytes_used=0, kv_bytes_budget=0)

    # ---------------------------------------------------------------- answers

    @final
    def evaluate(self, queries: Sequence[Query], /) -> Sequence[Result | Exception]:
        asked = [query for query in queries if query.adapter not in self._lost]
        found = answers_by_rows(self._answers, asked, self.undefined_ids, is_own) if asked else ()
        if not isinstance(found, Sequence) or len(found) != len(asked):
            return found  # the caller raises an error
        answers = iter(found)
        return [
            AdapterError(self._lost[query.adapter])
            if query.adapter in self._lost
            else next(answers)
            for query in queries
        ]

    def _answers(self, queries: Sequence[Query]) -> Sequence[Result | Exception]:
        with frequent_switches():
            found = self.ask("evaluate", queries)
            if not isinstance(found, PackedResults):
                return found  # the caller raises an error
            known = [each.logsumexp for each in found.answers if isinstance(each, RowRef)]
            rows: list[Row] = []
            for table in self._tables(len(known), found.width):
                rows += Row.of_table(table, known[len(rows) : len(rows) + len(table)])
            in_order = iter(rows)
            return [_unpacked(answer, in_order) for answer in found.answers]

    @final
    def evaluate_whole(self, query: RowQuery) -> Row:
        return self.ask("evaluate_whole", query)

    @final
    def picture_rules(
        self, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor]
    ) -> PictureRules:
        return self.ask("picture_rules", list(token_ids), dict(inputs))

    # ---------------------------------------------------------------- caching

    @final
    def num_cached(self, query: RowQuery, tier: TierName | None = None) -> int:
        return 0 if query.adapter in self._lost else self.ask("num_cached", query, tier)

    @final
    def save_prefix(self, query: RowQuery, path: str) -> None:
        self._check_adapter(query.adapter)
        self.ask("save_prefix", query, path)

    @final
    def load_prefix(self, path: str, adapter: Adapter | None) -> Sequence[int]:
        self._check_adapter(adapter)
        return self.ask("load_prefix", path, adapter)

    @final
    def pin(self, query: RowQuery) -> bool:
        self._check_adapter(query.adapter)
        return self.ask("pin", query)

    def _check_adapter(self, adapter: Adapter | None) -> None:
        if adapter in self._lost:
            raise AdapterError(self._lost[adapter])

    @final
    def clear(self) -> None:
        with contextlib.suppress(EngineDiedError):
            self.ask("clear")

    # ---------------------------------------------------------------- adapters

    @final
    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter; ``restart()`` loads it again."""
        path = os.path.abspath(path) if Path(path).exists() else path
        self.ask("add_adapter", adapter, path)
        self._loaded.add(adapter)
        self.adapters = {**self.adapters, adapter: path}

    @final
    def remove_adapter(self, adapter: Adapter) -> None:
        self.adapters = {own: path for own, path in self.adapters.items() if own != adapter}
        with contextlib.suppress(EngineDiedError):
            self.load_adapters()

    @final
    def load_adapters(self) -> None:
        """Load the missing ``adapters``, and remove loaded ones that are not among them."""
        wanted = self.adapters
        self._lost = {adapter: why for adapter, why in self._lost.items() if adapter in wanted}
        for adapter in self._loaded - wanted.keys():
            self.ask("remove_adapter", adapter)
            self._loaded.discard(adapter)
        for adapter in wanted.keys() - self._loaded - self._lost.keys():
            try:
                self.ask("add_adapter", adapter, wanted[adapter])
                self._loaded.add(adapter)
            except AdapterError as error:  # its files may be gone
                self._lost[adapter] = str(error)
                logger.warning("the adapter %r could not be reloaded: %s", adapter.name, error)

    @final
    def counts(self) -> EvaluatorCounts:
        """Return the counts that came with the latest reply."""
        return self._counts


def _unpacked(answer: Any, rows: Iterator[Row]) -> Any:
    if isinstance(answer, RowRef):
        return next(rows)
    return answer.error() if isinstance(answer, PackedError) else answer
