"""ReplicaSet: calls an evaluator's methods, except ``evaluate``, on one replica or on all."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NoReturn, TypeVar, final

import torch

from genlm_backend.errors import EngineDiedError, ModelStateError, OptionError
from genlm_backend.multimodal.pictures import PictureRules
from genlm_backend.prefix.budgets import TierName
from genlm_backend.queries.evaluator import (
    Evaluator,
    EvaluatorCounts,
    EvaluatorInfo,
    RestartableEvaluator,
)
from genlm_backend.queries.query import Adapter, RowQuery
from genlm_backend.remote.replicas.replica import Replica

T = TypeVar("T")

_SUMMED: Final = ("num_slots", "num_states", "num_host_slots")
_COMMON: Final = ("takes_adapters", "scores", "reads_out", "takes_steps", "omits_undefined")
"""Fields of ``EvaluatorInfo`` that are summed, and flags that are set if all replicas set them."""


@final
class ReplicaSet(Evaluator):
    """Several evaluators of one model as one ``Evaluator``, for all calls except ``evaluate``."""

    def __init__(self, evaluators: Sequence[Evaluator]) -> None:
        if not evaluators:
            raise OptionError("evaluators is empty: at least one replica is needed")
        if len(set(map(id, evaluators))) < len(evaluators):
            raise OptionError("evaluators contains an evaluator twice: each replica needs its own")
        if any("check_cancelled" in vars(evaluator) for evaluator in evaluators):
            raise OptionError("an evaluator belongs to another model: make new evaluators")
        self.evaluators = list(evaluators)
        self.replicas: list[Replica] = []
        self.infos: list[EvaluatorInfo] = []
        self.cleared: Callable[[], None] = lambda: None

    def begin(self, replicas: list[Replica], cleared: Callable[[], None]) -> None:
        """Set the evaluators' replicas, and the function to call once their caches are cleared."""
        self.replicas, self.cleared = replicas, cleared

    def open(self) -> EvaluatorInfo:
        """Open all replicas in parallel, each on its thread; return their common capabilities."""
        self.infos = _results([replica.open() for replica in self.replicas])
        for info in self.infos:
            if not isinstance(info, EvaluatorInfo):
                return info  # the caller raises an error
        widths = [info.vocab_size for info in self.infos]
        if len(set(widths)) > 1:
            raise OptionError(f"replicas must be of one model, got vocabularies of {widths} ids")
        return self.info_of_all()

    def info_of_all(self) -> EvaluatorInfo:
        """Return the replicas' common capabilities, and the sums of their slots and states."""
        of_all: dict[str, list[Any]] = {
            field.name: [getattr(info, field.name) for info in self.infos]
            for field in fields(EvaluatorInfo)
        }
        known = {n: [own for own in values if own is not None] for n, values in of_all.items()}
        least = {n: min(known[n], default=None) for n in ("max_length", "max_batch_size")}
        sums = {n: None if None in of_all[n] else sum(of_all[n]) for n in _SUMMED}
        common = {n: all(of_all[n]) for n in _COMMON}
        uses_openmp = any(of_all["uses_openmp"])
        return replace(self.infos[0], **least, **sums, **common, uses_openmp=uses_openmp)

    def _of_living(self, method: Callable[[Evaluator], Any]) -> list[Any]:
        """Call a method on the living replicas; return the results of those that do not die."""
        asked = self._asked(method)
        concurrent.futures.wait(asked)
        return _of_living(asked)

    def _asked(self, method: Callable[[Evaluator], T]) -> list[concurrent.futures.Future[T]]:
        return [replica.ask(method) for replica in self.replicas if not replica.is_dead]

    async def largest(self, method: Callable[[Evaluator], int | None]) -> int:
        # Submit on the calling thread, so that its later calls reach each replica after these.
        asked = self._asked(method)
        await asyncio.gather(*map(asyncio.wrap_future, asked), return_exceptions=True)
        return max((number or 0 for number in _of_living(asked)), default=0)

    def _of_one(self, what: str, method: Callable[[Evaluator], Any]) -> Any:
        for replica in self.replicas:
            if not replica.is_dead:
                try:
                    return replica.ask(method).result()
                except EngineDiedError:  # ``ask`` has marked the replica dead
                    continue
        raise EngineDiedError(f"no replica is alive that could {what}")

    # ---------------------------------------------------------------- dying

    def find_dead(self) -> None:
        """Call every replica that counts as alive, so that those that have died are marked dead."""
        self.num_cached(RowQuery([0]))

    def restart(self) -> None:
        """Restart the replicas that are marked dead; blocks the thread."""
        asked = []
        for replica in self.replicas:
            if replica.is_dead:
                evaluator = replica.evaluator
                if not isinstance(evaluator, RestartableEvaluator):
                    raise ModelStateError(
                        f"replica {replica.number} cannot restart: no RestartableEvaluator"
                    )
                asked.append(replica.restart(evaluator))
        for future in asked:
            future.result()

    # ---------------------------------------------------------------- methods of Evaluator

    def evaluate(self, queries: Sequence[Any], /) -> NoReturn:
        raise NotImplementedError("a ReplicaSet evaluates nothing: ReplicaBatcher asks one replica")

    def num_cached(self, query: RowQuery, tier: TierName | None = None) -> int:
        return max(self._of_living(lambda e: e.num_cached(query, tier)), default=0)

    def pin(self, query: RowQuery) -> bool:
        pinned = self._of_living(lambda e: e.pin(query))
        if not pinned:
            raise EngineDiedError("no replica is alive")
        return all(pinned)

    def picture_rules(
        self, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor]
    ) -> PictureRules:
        return self._of_one("read pictures", lambda e: e.picture_rules(token_ids, inputs))

    def save_prefix(self, query: RowQuery, path: str) -> None:
        self._of_one("save a prefix", lambda e: e.save_prefix(query, path))

    def load_prefix(self, path: str, adapter: Adapter | None) -> Sequence[int]:
        found = self._of_living(lambda e: e.load_prefix(path, adapter))
        if not found:
            raise EngineDiedError("no replica is alive that could load a prefix")
        return found[0]

    def clear(self) -> None:
        self._of_living(lambda e: e.clear())
        self.cleared()

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter on all replicas, or on none if one fails."""
        asked = {replica: replica.add_adapter(adapter, path) for replica in self.replicas}
        try:
            _results(asked.values())
            if all(replica.is_dead for replica in self.replicas):
                raise EngineDiedError("no replica is alive that could load an adapter")
        except BaseException:
            done = [replica for replica, future in asked.items() if future.exception() is None]
            _results([replica.remove_adapter(adapter) for replica in done])
            raise

    def remove_adapter(self, adapter: Adapter) -> None:
        _results([replica.remove_adapter(adapter) for replica in self.replicas])
        self.cleared()

    def counts(self) -> EvaluatorCounts:
        counts = [replica.evaluator.counts() for replica in self.replicas]
        names = [field.name for field in fields(EvaluatorCounts)]
        return EvaluatorCounts(**{n: sum(getattr(c, n) for c in counts) for n in names})

    def close(self) -> None:
        """Close all replicas in parallel, since each may take a while."""
        with concurrent.futures.ThreadPoolExecutor(max(1, len(self.replicas))) as threads:
            _results([threads.submit(replica.close) for replica in self.replicas])


def _of_living(asked: Collection[concurrent.futures.Future[Any]]) -> list[Any]:
    """Return the results of finished futures, except those with an ``EngineDiedError``."""
    return _results([f for f in asked if not isinstance(f.exception(), EngineDiedError)])


def _results(futures: Collection[concurrent.futures.Future[Any]]) -> list[Any]:
    concurrent.futures.wait(futures)
    return [future.result() for future in futures]
