"""VLLMSampler: continuations that vLLM samples by itself, in addition to rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, final

from genlm_backend.backends.vllm.completion import Completion
from genlm_backend.backends.vllm.session_planner import SessionPlanner
from genlm_backend.errors import BatcherClosedError
from genlm_backend.model.query import Query
from genlm_backend.model.sampling import Sampled


@final
class VLLMSampler:
    """Starts completions, keeps the engine going while there are any, and stops the unwanted."""

    def __init__(
        self,
        planner: SessionPlanner,
        forbidden: frozenset[int],
        call_soon: Callable[[Callable[[], None]], object],
        error_of: Callable[[Query], Exception | None],
    ) -> None:
        self._planner = planner
        self._forbidden = forbidden
        self._call_soon = call_soon
        self._error_of = error_of
        self._is_pumping = False

    async def sample(
        self, completions: Sequence[Completion], when_ended: Callable[[Any], None]
    ) -> list[Sampled]:
        """Return the ids sampled for each completion; stop them all if one fails."""
        self._call_soon(lambda: self._start(completions))
        futures = [asyncio.wrap_future(completion.future) for completion in completions]
        for future in futures:
            future.add_done_callback(when_ended)
        try:
            return await asyncio.gather(*futures)
        finally:
            for completion in completions:
                completion.future.cancel()

    # ---------------------------------------------------------------- on the thread of the engine

    def _start(self, completions: Sequence[Completion]) -> None:
        known: list[Completion] = []
        for completion in completions:
            error = self._error_of(completion.prompt)
            if error is None:
                known.append(completion)
            else:
                completion.fail(error)
        self._planner.start(known, self._forbidden)
        if not self._is_pumping:
            self._pump()

    def _pump(self) -> None:
        """Make one step for the completions, and queue the next if any are left."""
        # Batches that wait go in between, and take the completions along.
        self._is_pumping = self._planner.go_on()
        if self._is_pumping:
            with contextlib.suppress(BatcherClosedError):  # whoever closes it settles what is left
                self._call_soon(self._pump)
