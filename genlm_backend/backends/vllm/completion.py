"""Completion: a continuation that vLLM's sampler draws, token by token."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Collection
from typing import Final, final

from genlm_backend.errors import EvaluationError
from genlm_backend.queries.query import RowQuery
from genlm_backend.readouts.sampling import Sampled, seed_of

LEAST_TEMPERATURE: Final = 0.01
"""Lowest positive temperature at which vLLM samples; it raises lower positive ones to this."""

_numbers = itertools.count()


@final
class Completion:
    """A request to vLLM's sampler: its tokens so far, and a future for the complete sample."""

    def __init__(
        self,
        prompt: RowQuery,
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float,
        seed: int | None,
        stream: int,
        max_length: int,
    ) -> None:
        self.id = f"completion-{next(_numbers)}"
        self.prompt = prompt
        self.eos_token_ids = frozenset(eos_token_ids)
        self.temperature = temperature
        self.seed = seed_of(seed, stream) >> 1  # 63 bits: vLLM reads a signed integer
        self.max_tokens = max_tokens
        self.max_length = max_length
        self.token_ids: list[int] = []
        self.future: concurrent.futures.Future[Sampled] = concurrent.futures.Future()

    @property
    def num_possible(self) -> int:
        """Maximum number of tokens to sample; the last one may follow ``max_length`` tokens."""
        return min(self.max_tokens, self.max_length + 1 - len(self.prompt.context))

    def extend(self, token_ids: list[int], is_finished: bool) -> None:
        """Add the tokens that a step has sampled; settle the future if ``is_finished``."""
        self.token_ids.extend(token_ids)
        if not is_finished:
            return
        if self.token_ids and self.token_ids[-1] in self.eos_token_ids:
            self._settle(result=Sampled(self.token_ids[:-1], "eos"))
        elif len(self.token_ids) >= self.num_possible:
            self._settle(result=Sampled(self.token_ids, "length"))
        else:
            self._settle(
                error=EvaluationError(
                    f"vLLM ended a sample after {len(self.token_ids)} tokens, without an "
                    f"end-of-sequence token and short of {self.num_possible} tokens"
                )
            )

    def fail(self, error: BaseException) -> None:
        self._settle(error=error)

    def _settle(self, result: Sampled | None = None, error: BaseException | None = None) -> None:
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if result is not None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
