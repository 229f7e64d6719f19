"""Rounds: what an engine of sessions is asked to do, one round after another.

A round computes the rows of as many contexts as the engine has room for at once; completions go
on in every round, and in rounds of their own where no row is wanted.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator

import torch

from genlm_backend.errors import EvaluationError
from genlm_backend.llm.query import Query
from genlm_backend.llm.vllm.completion import Completion
from genlm_backend.llm.vllm.session_engine import SessionEngine
from genlm_backend.llm.vllm.sessions import SessionTable, Step


class Rounds:
    """Plans rounds over an engine, and gives up the oldest sessions where there is no room.

    Everything happens on the thread that calls.

    Args:
        engine: Used by nobody else.
        check_wanted: Called before each round of rows; raises a ``QueryDroppedError`` where nobody
            waits for them any more.

    Attributes:
        table: The sessions.
        tokens_computed: Tokens of contexts that the engine has computed.
        tokens_reused: Tokens whose keys and values were there.
        tokens_evicted: Tokens of sessions that were given up for others.
    """

    def __init__(
        self, engine: SessionEngine, check_wanted: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._check_wanted = check_wanted
        # Rows are told apart by session, and several models may live in one process.
        self.table = SessionTable(engine.max_sessions, prefix=uuid.uuid4().hex)
        self.tokens_computed = self.tokens_reused = self.tokens_evicted = 0

    # ---------------------------------------------------------------- rows

    def evaluate(self, queries: list[Query]) -> list[torch.Tensor]:
        """Return the engine's row of each query, in as few rounds as it has room for."""
        rows: list[torch.Tensor] = []
        while len(rows) < len(queries):
            self._check_wanted()  # the engine is between two rounds, and nothing is amiss
            with self._distrusting():
                steps = self._plan_round(queries[len(rows) :])
                for step in steps:
                    self._engine.add(step)
                sessions = [step.session for step in steps]
                rows.extend(self._engine.run(sessions, self._release_oldest))
                self.table.commit()
                reused = sum(step.num_shared for step in steps)
                self.tokens_reused += reused
                self.tokens_computed += sum(len(s.query.token_ids) for s in steps) - reused
        return rows

    def _plan_round(self, queries: list[Query]) -> list[Step]:
        """Choose steps for as many of the queries, in order, as there is room for."""
        steps: list[Step] = []
        reserved = 0
        for query in queries:
            step = self.table.step(query)
            needed = self._blocks_of(step)
            if not self._make_room(reserved + needed):
                self.table.withdraw(step)
                if steps:
                    break
                self.forget_sessions()  # what the step itself holds is in its way
                step = self.table.step(query)
                while not self._make_room(needed := self._blocks_of(step)):
                    if self._engine.completions:  # the room is theirs until they end
                        self._engine.step(self._release_oldest)
                        continue
                    self.table.withdraw(step)
                    raise EvaluationError(
                        f"a context of {len(query.token_ids)} tokens does not fit into vLLM's "
                        f"{self._engine.num_blocks} blocks of {self._engine.block_size} tokens"
                    )
            reserved += needed
            steps.append(step)
        return steps

    def _blocks_of(self, step: Step) -> int:
        """Return how many more blocks a step takes, at most.

        A session that is extended has its last block already; a new one shares full blocks only.
        """
        size = self._engine.block_size
        there = step.num_shared // size if step.is_new else -(-step.num_shared // size)
        return -(-len(step.query.token_ids) // size) - there

    def _make_room(self, num_blocks: int) -> bool:
        """Give up the oldest sessions until the round fits; return whether it does."""
        # Sessions leave half of the places to the completions, if those need as many.
        limit = self._engine.max_sessions
        self.table.max_sessions = limit - min(len(self._engine.completions), limit // 2)
        while len(self.table) > self.table.max_sessions or (
            self._engine.num_free_blocks() < num_blocks
        ):
            if not self._release_oldest():
                return False
        return True

    def _release_oldest(self) -> bool:
        """Give up the session unused for longest; return whether there was one."""
        session = self.table.oldest()
        if session is None:
            return False
        self._engine.release([session])
        self.tokens_evicted += self.table.forget(session)
        return True

    def forget_sessions(self) -> None:
        """Give up every session."""
        self._engine.release(self.table.clear())

    @contextlib.contextmanager
    def _distrusting(self) -> Iterator[None]:
        """Trust nothing that was under way in the engine when an exception comes out of it."""
        try:
            yield
        except BaseException as error:
            completions = list(self._engine.completions.values())
            try:
                self._engine.stop(completions)
                self.forget_sessions()
            finally:
                self.table.clear()
                for completion in completions:
                    completion.fail(error)
            raise

    # ---------------------------------------------------------------- completions

    def start(self, completions: list[Completion], forbidden: frozenset[int]) -> None:
        """Hand completions to the engine; an error of it is theirs."""
        try:
            with self._distrusting():
                for completion in completions:
                    self._engine.start(completion, forbidden)
        except Exception as error:
            for completion in completions:  # those that were not started yet
                completion.fail(error)

    def go_on(self) -> bool:
        """Make a step for the completions; return whether any are left.

        Those that nobody waits for are given up. An error of the engine is theirs.
        """
        with contextlib.suppress(Exception), self._distrusting():
            completions = self._engine.completions
            gone = [c for c in completions.values() if c.future.cancelled()]
            if gone:
                self._engine.stop(gone)
            if completions:
                self._make_room(0)
                self._engine.step(self._release_oldest)
        return bool(self._engine.completions)
