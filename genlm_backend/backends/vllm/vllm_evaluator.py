"""VLLMEvaluator: answers queries for next-token rows, readouts and scores with vLLM."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch

from genlm_backend.backends.vllm.completion import Completion
from genlm_backend.backends.vllm.session_planner import SessionPlanner
from genlm_backend.errors import BatcherClosedError, CacheError, UnknownAdapterError
from genlm_backend.prefix.budgets import TierName
from genlm_backend.queries.evaluator import Evaluator, EvaluatorCounts, EvaluatorInfo
from genlm_backend.queries.query import Adapter, Query, Result, RowQuery
from genlm_backend.queries.row import Row, rows_on, rows_without, stacked
from genlm_backend.readouts.readout import RowQueries
from genlm_backend.readouts.score_query import NO_EXTRAS, ScoreExtras, ScoreQuery, scores_of_rows
from genlm_backend.runtime.blocking import result_of

if TYPE_CHECKING:  # vllm_engine imports vLLM
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine


import random

from genlm_backend.backends.vllm.release import installed_release
from genlm_backend.errors import UnsupportedModelError

_LONGEST_PASS: Final = 2048
"""Longest text, in tokens, to score in one pass: vLLM holds the logits of all tokens at once."""

_MOST_OF_PROMPT: Final = 64
"""Largest ratio of all tokens to scored ones for one pass; above it, cached rows are faster."""


@final
class VLLMEvaluator(Evaluator):
    """Computes rows in sessions (requests that stay in vLLM), scores in one pass or from rows."""

    def __init__(
        self, engine: VLLMEngine, output_device: torch.device, max_length: int | None = None
    ) -> None:
        self.engine = engine
        self.planner = SessionPlanner(engine)
        self._output_device = output_device
        self._max_length = max_length

    def open(self) -> EvaluatorInfo:
        """Return the capabilities of the engine, which is loaded already."""
        engine = self.engine
        num_slots = engine.num_blocks * engine.block_size
        longest = min(engine.max_length, num_slots)
        return EvaluatorInfo(
            vocab_size=engine.vocab_size,
            max_length=min(self._max_length or longest, longest),
            max_batch_size=engine.max_sessions,
            num_slots=num_slots,
            slots_per_block=engine.block_size,
            kv_cache_dtype=engine.kv_cache_dtype,
            takes_adapters=True,
            scores=True,
            reads_out=True,
            eos_token_ids=engine.eos_token_ids,
        )

    @property
    def has_died(self) -> bool:
        """Whether a call has found that the engine has ended."""
        return self.engine.has_died

    # ---------------------------------------------------------------- rows

    def evaluate(self, queries: Sequence[Query], /) -> Sequence[Result]:
        """Return one answer per query: a row on the output device, a readout, or scores."""
        scorings: list[Any] = [query for query in queries if query.num_targets]
        if len(scorings) == len(queries):
            return self._scores(scorings)
        others = [query for query in queries if not query.num_targets]
        answers = self._read(others)
        places = [i for i, answer in enumerate(answers) if isinstance(answer, Row)]
        rows = rows_on([answers[i] for i in places], self._output_device)
        for i, row in zip(places, rows, strict=True):
            answers[i] = row
        if not scorings:
            return answers
        found = dict(zip([*others, *scorings], [*answers, *self._scores(scorings)], strict=True))
        return [found[query] for query in queries]

    def _read(self, queries: Sequence[Any]) -> list[Any]:
        """Return a row or readout for each query; queries of equal ``forward_key`` share a row."""
        asked: defaultdict[RowQuery, list[Any]] = defaultdict(list)
        for query in queries:
            asked[query.forward_key].append(query)
        if not any(query.needs_row for query in queries):
            return self.planner.evaluate(queries, self.check_cancelled)
        wanted = RowQueries([*asked.values()], self.undefined_ids)
        found = self.planner.evaluate([*asked], self.check_cancelled, wanted)
        pairs = zip(asked.values(), found, strict=True)
        answer_to = {q: a for own, its in pairs for q, a in zip(own, its, strict=True)}
        return [answer_to[query] for query in queries]

    def _scores(self, scorings: Sequence[ScoreQuery]) -> list[Result]:
        """Return the scores of texts, each computed in one pass if ``_is_pass``, else from rows."""
        at_once = [scoring for scoring in scorings if self._is_pass(scoring)]
        found = dict(zip(at_once, self.planner.score(at_once, self.check_cancelled), strict=True))
        rest: defaultdict[ScoreExtras, list[ScoreQuery]] = defaultdict(list)
        for scoring in scorings:
            if scoring not in found:
                rest[scoring.beside].append(scoring)
        for own in rest.values():
            scores = result_of(scores_of_rows(own, self._table, self.engine.max_sessions))
            found.update(zip(own, scores, strict=True))
        return [found[scoring] for scoring in scorings]

    async def _table(self, queries: Sequence[RowQuery]) -> torch.Tensor:  # never awaits
        rows = self.planner.evaluate(queries, self.check_cancelled)
        if self.undefined_ids:
            rows = rows_without(rows, torch.tensor(self.undefined_ids, dtype=torch.int64))
        return stacked(rows)

    def _is_pass(self, scoring: ScoreQuery) -> bool:
        """Return whether to score a text in one pass instead of from rows."""
        # The pass gives one number per token, does not exclude undefined ids, computes the prompt
        # again if vLLM has evicted it, and holds the logits of all tokens at once.
        size = len(scoring.text.context)
        return (
            self.engine.scores_texts
            and scoring.beside == NO_EXTRAS
            and not self.undefined_ids
            and scoring.text.context.pictures is None
            and size <= min(_LONGEST_PASS, self.engine.max_length)
            and size <= _MOST_OF_PROMPT * scoring.num_targets
        )

    # ---------------------------------------------------------------- caching

    def num_cached(self, query: RowQuery, tier: TierName | None = None) -> int:
        """Return how many tokens before a context's last one are cached; 0 for tier "host"."""
        return 0 if tier == "host" else self.planner.table.source_of(query)[1]

    def pin(self, query: RowQuery) -> bool:
        """Raise a ``CacheError``: ``SessionPlanner`` may end any session to free blocks."""
        raise CacheError("the vLLM backend cannot pin a prompt: any prompt may be evicted")

    def clear(self) -> None:
        """End all sessions and empty the KV cache; running completions are computed again."""
        self.planner.end_sessions()
        self.engine.reset()

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load a LoRA adapter; the engine needs ``enable_lora=True``."""
        self.engine.add_adapter(adapter, path)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter, end all sessions, and fail the completions sampled with it."""
        sampled = self.samples_of(adapter)
        self.engine.stop(sampled)
        for completion in sampled:
            completion.fail(
                UnknownAdapterError(f"the LoRA adapter {adapter.name!r} has been removed")
            )
        self.planner.end_sessions()
        self.engine.remove_adapter(adapter)

    def samples_of(self, adapter: Adapter) -> list[Completion]:
        return [c for c in self.engine.completions.values() if c.prompt.adapter == adapter]

    # ---------------------------------------------------------------- keeping house

    def counts(self) -> EvaluatorCounts:
        """Return the numbers of passes and tokens; this backend does not count bytes."""
        return EvaluatorCounts(
            num_forwards=self.engine.num_steps,
            tokens_computed=self.planner.tokens_computed,
            tokens_reused=self.planner.tokens_reused,
            num_evicted_tokens=self.planner.tokens_evicted,
        )

    def close(self) -> None:
        """Close the engine; unfinished completions get a ``BatcherClosedError``."""
        completions = list(self.engine.completions.values())
        try:
            self.engine.close()
        finally:
            for completion in completions:
                completion.fail(BatcherClosedError("the model was closed before the sample ended"))


_FEWEST: Final = 16
_ROUNDING: Final = 0.05
_NUM_OWN: Final = 3  # tokens of a fork after its shared prefix


def compare_rows(evaluator: VLLMEvaluator) -> None:
    """Raise an error if rows of extended or forked contexts differ from rows computed uncached."""
    engine, planner, generator = evaluator.engine, evaluator.planner, random.Random(0)
    size = min(3 * engine.block_size + 2, engine.max_length - _NUM_OWN - 1, 200)
    if size < _FEWEST:  # too short to show a difference
        return
    first, other = ([generator.randrange(engine.vocab_size) for _ in range(size)] for _ in "12")
    own = [other[i : i + _NUM_OWN] for i in range(0, 3 * _NUM_OWN, _NUM_OWN)]
    points = [size // 3, size // 2, 3 * size // 4]
    forks = [[*first[:point], *tail] for point, tail in zip(points, own, strict=True)]
    grown = [[*first, other[-1]], [*first, other[-2]], [*forks[0], other[-3]]]
    contexts, num_kept = [*forks, *grown], [*points, size, size, len(forks[0])]

    def rows(contexts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        found = planner.evaluate([RowQuery(ids) for ids in contexts], evaluator.check_cancelled)
        return [row.logprobs.float() for row in found]

    def forgotten() -> None:
        planner.end_sessions()
        engine.reset()

    try:
        rows([first])
        found = [*rows(forks), *rows(grown)]
        forgotten()
        expected = list[torch.Tensor]()
        for context in contexts:
            expected += rows([context])
            forgotten()
        wrong = [
            [*ids[: kept - 1], (ids[kept - 1] + 1) % engine.vocab_size, *ids[kept:]]
            for ids, kept in zip(contexts, num_kept, strict=True)
        ]
        spreads = [*map(_distance, rows(wrong), expected)]
    finally:
        forgotten()
        planner.tokens_computed = planner.tokens_reused = planner.tokens_evicted = 0
        engine.num_steps = 0
    differences = [*map(_distance, found, expected)]
    # A difference counts if it exceeds 0.05 and half of the difference made by a wrong last cached
    # token. In 16-bit precision, rounding makes a difference of 0.05, and a wrong token one of 0.3.
    for difference, spread in zip(differences, spreads, strict=True):
        if not difference <= max(_ROUNDING, spread / 2):
            raise UnsupportedModelError(
                f"with vLLM {installed_release()}, rows of this model depend on the cache: "
                "log-probabilities of an extended or forked context have a root mean square "
                f"difference of {difference:.2g} from those of the same context computed whole "
                f"(with a wrong token: {spread:.2g}). Use engine_opts={{'enforce_eager': True}} or "
                f"{{'dtype': 'float32'}}, another release or backend 'hf', or accept the rows "
                "with check_rows=False"
            )


def _distance(row: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root mean square difference of two rows, over ids that are likely in either."""
    # All ids count if none is likely. If a row excludes a likely id of the other, return infinity.
    likely = (row > _LEAST) | (other > _LEAST)
    row, other = (row[likely], other[likely]) if likely.any() else (row, other)
    return float((row - other).square().mean().sqrt())


_LEAST: Final = -12.0  # ids with larger log-probabilities are likely
