"""SessionPlanner: divides a batch into parts that fit the engine's blocks and request limit.

A batch is a list of queries. Their contexts run in sessions: requests that stay in the engine.
Each engine step advances completions (samples) too; without a batch, they get their own steps.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from genlm_backend.backends.vllm.completion import Completion
from genlm_backend.backends.vllm.sessions import Placement, SessionTable
from genlm_backend.errors import EngineDiedError, EvaluationError, QueryDroppedError
from genlm_backend.queries.query import RowQuery
from genlm_backend.readouts.readout import RowQueries
from genlm_backend.readouts.score_query import ScoreQuery

if TYPE_CHECKING:  # vllm_engine imports vLLM
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine


class Scored(NamedTuple):
    """A text's scores, its numbers of computed and cached tokens, and whether scores are valid."""

    scores: torch.Tensor  # [num_targets] float32
    num_computed: int
    num_reused: int
    is_whole: bool = True


@final
class SessionPlanner:
    """Runs batches in parts, on the caller's thread; ends least recently used sessions for room."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        # All models of a process keep logits in one dict by session id; a prefix makes ids unique.
        self.table = SessionTable(engine.max_sessions, prefix=uuid.uuid4().hex)
        self.tokens_computed = self.tokens_reused = self.tokens_evicted = 0

    # ---------------------------------------------------------------- rows

    def evaluate(
        self,
        queries: Sequence[RowQuery],
        check_cancelled: Callable[[], None],
        wanted: RowQueries | None = None,
    ) -> list[Any]:
        """Return each query's row, or its ``wanted`` readouts; run the batch part by part."""
        rows: dict[int, Any] = {}
        while len(rows) < len(queries):
            check_cancelled()  # between parts: if it raises, sessions stay valid
            with self._distrusting():
                left = [i for i in range(len(queries)) if i not in rows]
                placements = self._plan_part([queries[i] for i in left], check_cancelled)
                del left[len(placements) :]
                rows.update(self._run_part(left, placements, wanted))
        return [rows[i] for i in range(len(queries))]

    def _run_part(
        self, indices: list[int], placements: list[Placement], wanted: RowQueries | None
    ) -> dict[int, Any]:
        for placement in placements:
            self._engine.add(placement)
        sessions = [placement.session for placement in placements]
        own = None if wanted is None else wanted.of(indices)
        found = self._engine.run(sessions, self._end_oldest, own)
        if not found and not self.table.num_computed:
            raise EvaluationError(f"vLLM has no room for any of {len(sessions)} contexts")
        # If rows are missing, completions may have taken blocks reserved for the part, and may wait
        # for blocks of its sessions. In this case, end all sessions, so that their blocks are free
        # for the completions and the next part.
        if len(found) == len(sessions):
            self.table.commit()
        else:
            self.end_sessions()
        computed = [placement for placement in placements if placement.session in found]
        reused = sum(placement.num_shared for placement in computed)
        self.tokens_reused += reused
        self.tokens_computed += sum(len(p.query.context) for p in computed) - reused
        pairs = zip(indices, sessions, strict=True)
        return {i: found[session] for i, session in pairs if session in found}

    def score(
        self, texts: Sequence[ScoreQuery], check_cancelled: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Return the scores of texts, computed in parts for which the engine has room."""
        scores: list[torch.Tensor] = []
        while len(scores) < len(texts):
            check_cancelled()
            with self._distrusting():
                part = self._scorable(texts[len(scores) :])
                for found in self._engine.score(part, self._end_oldest):
                    scores.append(found.scores)
                    self.tokens_computed += found.num_computed
                    self.tokens_reused += found.num_reused
        return scores

    def _scorable(self, texts: Sequence[ScoreQuery]) -> list[ScoreQuery]:
        """Return the first texts that fit together, or the first text alone if it does not fit."""
        part, size, reserved = list[ScoreQuery](), self._engine.block_size, self._num_left()
        for text in texts[: max(1, self._engine.max_sessions // 2)]:
            reserved += len(text.text.context) // size + 1
            if not self._make_room(reserved) and part:
                break
            part.append(text)
        return part

    def _plan_part(
        self, queries: Sequence[RowQuery], check_cancelled: Callable[[], None]
    ) -> list[Placement]:
        """Return placements of the first queries that fit together: at least one, or raise."""
        placements, reserved = list[Placement](), self._num_left()
        for query in queries:
            placement = self.table.place(query)
            needed = self._blocks_of(placement)
            if not self._make_room(reserved + needed):
                self.table.withdraw(placement)
                if placements:
                    break
                self.end_sessions()  # even the reused one, to make room
                placement = self.table.place(query)
                while not self._make_room(needed := self._blocks_of(placement)):
                    self.table.withdraw(placement)  # so that an error leaves no placement
                    if not self._engine.completions:
                        raise EvaluationError(
                            f"a context of {len(query.context)} tokens does not fit into vLLM's "
                            f"{self._engine.num_blocks} blocks of {self._engine.block_size} tokens"
                        )
                    self._engine.step(self._end_oldest)  # finished completions free blocks
                    check_cancelled()
                    placement = self.table.place(query)
            reserved += needed
            placements.append(placement)
        return placements

    def _blocks_of(self, placement: Placement) -> int:
        """Return how many more blocks a placement needs, at most."""
        size = self._engine.block_size
        num_shared = placement.num_shared
        # An extended session keeps its partial last block; a new one shares full blocks only.
        there = num_shared // size if placement.is_new else -(-num_shared // size)
        return -(-len(placement.query.context) // size) - there

    def _num_left(self) -> int:
        """Return the number of requests, and equally of blocks, to reserve for completions."""
        # Each completion may take a block in the next step; batches keep half of the requests.
        return min(len(self._engine.completions), self._engine.max_sessions // 2)

    def _make_room(self, num_blocks: int) -> bool:
        """End old sessions until few enough remain and ``num_blocks`` are free; return success."""
        self.table.max_sessions = self._engine.max_sessions - self._num_left()
        while len(self.table) > self.table.max_sessions or (
            self._engine.num_free_blocks() < num_blocks
        ):
            if not self._end_oldest():
                return False
        return True

    def _end_oldest(self) -> bool:
        """End the least recently used session outside the part; return whether there was one."""
        session = self.table.oldest()
        if session is None:
            return False
        self._engine.end([session])
        self.tokens_evicted += self.table.remove(session)
        return True

    def end_sessions(self) -> None:
        self._engine.end(self.table.clear())

    @contextlib.contextmanager
    def _distrusting(self) -> Iterator[None]:
        """On errors other than ``QueryDroppedError``, end all sessions and fail all completions."""
        try:
            yield
        except QueryDroppedError:  # raised only between steps, when all states are known
            raise
        except BaseException as error:
            completions = list(self._engine.completions.values())
            try:
                if not isinstance(error, EngineDiedError):  # sessions end with the engine
                    self._engine.stop(completions)
                    self.end_sessions()
            finally:
                self.table.clear()
                for completion in completions:
                    completion.fail(error)
            raise

    # ---------------------------------------------------------------- completions

    def start(self, completions: list[Completion], forbidden: frozenset[int]) -> None:
        """Start completions in the engine; an error settles all that are unsettled."""
        # Prompts of more than a block in total are first computed as sessions, which completions
        # fork. So each distinct prompt is computed once, a long one in chunks. A part takes half of
        # the requests, so that all its completions begin in one step, before these sessions end.
        is_short = sum(len(c.prompt.context) for c in completions) <= self._engine.block_size
        size = len(completions) if is_short else max(1, self._engine.max_sessions // 2)
        try:
            for i in range(0, len(completions), size):
                part = completions[i : i + size]
                if not is_short:
                    self._compute_prompts(part)
                with self._distrusting():
                    for completion in part:
                        source, num_shared = self.table.source_of(completion.prompt)
                        self._engine.start(completion, forbidden, source, num_shared)
                    if not is_short:
                        self._step()
        except Exception as error:
            for completion in completions:  # no effect on settled ones
                completion.fail(error)

    def _compute_prompts(self, completions: Sequence[Completion]) -> None:
        def check_cancelled() -> None:
            if all(completion.future.cancelled() for completion in completions):
                raise QueryDroppedError("no caller is waiting for the samples any more")

        prompts = [*dict.fromkeys(completion.prompt for completion in completions)]
        self.evaluate(prompts, check_cancelled, RowQueries([()] * len(prompts)))

    def go_on(self) -> bool:
        """Step the completions; an error ends them all. Return whether any is unfinished."""
        with contextlib.suppress(Exception), self._distrusting():
            self._step()
        return bool(self._engine.completions)

    def _step(self) -> None:
        if self._engine.completions:
            self._make_room(self._num_left())
            self._engine.step(self._end_oldest)
