"""ResultCollector runs batches and checks the results; AdapterNames lists loaded adapters."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, cast, final

import torch

from genlm_backend.batching.pending_query import presentable
from genlm_backend.checks import instance, shown, text
from genlm_backend.errors import EvaluationError, UnknownAdapterError
from genlm_backend.queries.evaluator import Evaluator, EvaluatorInfo
from genlm_backend.queries.query import UNKNOWN_ADAPTER, Adapter, Query, Result
from genlm_backend.queries.row import Row, RowCache, alone, are_rows_of, rows_without
from genlm_backend.readouts.readout import answers_by_rows, is_own

ADAPTER_CHECKS: Final = {"lora_name": text, "lora_path": instance((str, Path), "a path")}


@final
class AdapterNames:
    """Loaded adapters by name; only the worker thread changes them, any thread may read them."""

    def __init__(self) -> None:
        # These two are replaced, never mutated: other threads read them without a lock.
        self._named: Mapping[str, Adapter] = {}
        self._loaded: frozenset[Adapter] = frozenset()
        self._numbers = itertools.count(1)  # unique per load, unlike names, which can be reused

    def new(self, name: str) -> Adapter:
        """Return an ``Adapter`` with a new number; the caller loads it, then calls ``add``."""
        plain = str.__str__(name)  # not a str subclass: another process may lack the class
        return Adapter(plain, next(self._numbers))

    def add(self, adapter: Adapter) -> Adapter | None:
        """Bind a loaded adapter to its name; return the adapter that it replaces, or ``None``."""
        # Until the replaced adapter is removed, it answers the queries that were made with it.
        replaced = self._named.get(adapter.name)
        self._loaded |= {adapter}
        self._named = {**self._named, adapter.name: adapter}
        return replaced

    def remove(self, adapter: Adapter) -> None:
        self._named = {name: a for name, a in self._named.items() if a != adapter}
        self._loaded -= {adapter}

    def get(self, name: str) -> Adapter:
        named = self._named
        if name not in named:
            known = ", ".join(map(repr, sorted(named))) or "none"
            raise UnknownAdapterError(
                f"{UNKNOWN_ADAPTER.format(name)} (loaded: {known}); load it with add_new_lora()"
            )
        return named[name]

    def error_of(self, query: Query) -> UnknownAdapterError | None:
        """Return an error if the query's adapter is no longer loaded, else ``None``."""
        adapter = query.adapter
        if adapter is None or adapter in self._loaded:
            return None
        return UnknownAdapterError(
            f"the LoRA adapter {adapter.name!r} was removed or replaced after the query was made"
        )


@final
class ResultCollector:
    """Evaluates a batch, checks the answers, masks undefined ids in rows and caches the rows."""

    def __init__(self, evaluator: Evaluator, rows: RowCache[Row], adapters: AdapterNames) -> None:
        self._evaluator, self._rows, self._adapters = evaluator, rows, adapters

    def opened(self, info: EvaluatorInfo, vocab_size: int, undefined_ids: Collection[int]) -> None:
        """Store the evaluator's capabilities and the undefined ids, before the first query."""
        self._is_bounded, self._reads_out = info.max_batch_size is not None, info.reads_out
        self._evaluator.undefined_ids = tuple(sorted(undefined_ids))
        self._is_to_exclude = bool(undefined_ids) and not info.omits_undefined
        self._vocab_size = vocab_size
        self._undefined = torch.tensor(self._evaluator.undefined_ids, dtype=torch.int64)

    def weight(self, query: Query) -> float:
        """Return 1 if the evaluator has a ``max_batch_size``, else the query's own ``weight``."""
        return 1.0 if self._is_bounded else query.weight

    def forward_key(self, query: Query) -> Hashable:
        """Return the query if the evaluator has a ``max_batch_size``, else its ``forward_key``."""
        return query if self._is_bounded else query.forward_key

    def answers(self, queries: Sequence[Query]) -> list[Result | Exception]:
        """Return each query's answer, or the error that its callers get."""
        num_clears = self._rows.num_clears
        refused = self._refused(queries)
        known = [q for q in queries if q not in refused] if refused else queries
        answers = iter(self._found(known, self._evaluated(known), num_clears) if known else ())
        if not refused:
            return [*answers]
        return [refused[q] if q in refused else next(answers) for q in queries]

    def _evaluated(self, queries: Sequence[Query]) -> Any:
        if self._reads_out or all(map(_KEEPS_ROW, queries)):
            return self._evaluator.evaluate(queries)
        undefined_ids = self._evaluator.undefined_ids if self._is_to_exclude else ()
        return answers_by_rows(self._rows_to_read, queries, undefined_ids)

    def _rows_to_read(self, queries: Sequence[Query]) -> Any:
        """Return the evaluator's answers, checked so that readouts are computed from valid rows."""
        found = self._evaluator.evaluate(queries)
        if not isinstance(found, Sequence) or len(found) != len(queries):
            return found  # ``_found`` raises the error
        return list(map(self._checked, queries, found))

    def _refused(self, queries: Sequence[Query]) -> dict[Query, Exception]:
        if set(map(_ADAPTER, queries)) == {None}:
            return {}
        errors = {query: self._adapters.error_of(query) for query in queries}
        return {query: error for query, error in errors.items() if error is not None}

    def _found(
        self, queries: Sequence[Query], found: Any, num_clears: int
    ) -> list[Result | Exception]:
        """Check and return the evaluator's answers ``found``; cache the rows among them."""
        if not isinstance(found, Sequence) or len(found) != len(queries):
            what = f"{len(found)} answers" if isinstance(found, Sequence) else shown(found)
            raise EvaluationError(f"{self._method} returned {what} for {len(queries)} queries")
        are_rows = all(map(_KEEPS_ROW, queries)) and set(map(type, found)) == {Row}
        if are_rows and are_rows_of(found, self._vocab_size):
            return self._kept(queries, found, num_clears)
        pairs = zip(queries, found, strict=True)
        answers = [self._checked(query, answer) for query, answer in pairs]
        pairs = enumerate(zip(queries, answers, strict=True))
        indices = [i for i, (q, a) in pairs if q.is_cacheable and isinstance(a, Row)]
        rows = self._kept([queries[i] for i in indices], [answers[i] for i in indices], num_clears)
        for index, row in zip(indices, rows, strict=True):
            answers[index] = row
        return answers

    def _kept(self, queries: Sequence[Any], rows: Sequence[Any], num_clears: int) -> list[Any]:
        """Set undefined ids to ``-inf`` if the evaluator does not, cache the rows, return them."""
        if self._is_to_exclude:
            rows = rows_without(rows, self._undefined)
        if rows and self._rows.takes(rows[0].nbytes):
            # Keys are plain tuples: they equal the queries but keep no pictures alive.
            self._rows.put_all(zip(map(tuple, queries), alone(rows), strict=True), num_clears)
        return list(rows)

    def defined(self, row: Row) -> Row:
        """Return the row with undefined ids set to ``-inf``, renormalised."""
        return row.without(self._undefined) if len(self._undefined) else row

    def _checked(self, query: Query, answer: Any) -> Result | Exception:
        """Return the answer, or an exception if it does not fit the query or cannot be checked."""
        size = self._vocab_size
        try:
            if isinstance(answer, Exception) or query.is_answered_by(answer, size):
                return answer
            wanted, got = query.wanted.format(vocab_size=size), shown(answer)
        except (Exception, SystemExit) as error:  # raised by a user-defined readout
            return cast(Exception, presentable(error))
        kind = type(query)
        method = f"{kind.__name__}.of_rows" if is_own(kind) else self._method
        return EvaluationError(f"{method} must return {wanted}, or an exception, got {got}")

    @property
    def _method(self) -> str:
        return f"{type(self._evaluator).__name__}.evaluate"


_ADAPTER, _KEEPS_ROW = attrgetter("adapter"), attrgetter("is_cacheable")
