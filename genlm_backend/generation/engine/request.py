"""GenerationRequest: the handle of texts that an engine generates."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, final

from genlm_backend.checks import timeout as check_timeout
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.engine.result_queue import ResultQueue
from genlm_backend.generation.engine.status import GenerationStatus, RequestStatistics
from genlm_backend.generation.generated import Generation

if TYPE_CHECKING:
    from genlm_backend.generation.engine.served_model import ServedModel

_ids = itertools.count()


@final
class GenerationRequest:
    """A request of an engine. Made by its ``start_request_…`` methods.

    ``await request`` waits for its end and returns its texts; ``request.queue`` has them as they
    come.

    Attributes:
        id: Number of the request, different for each of a process.
        prompt_token_ids: Token ids of the prompt.
        config: How its texts are generated.
        queue: The results as they come.
        model: What works at the request.
    """

    def __init__(
        self, model: ServedModel, prompt_token_ids: tuple[int, ...], config: GenerationConfig
    ) -> None:
        self.id = next(_ids)
        self.prompt_token_ids = prompt_token_ids
        self.config = config
        self.queue = ResultQueue(config.n, len(prompt_token_ids), config.logprobs)
        self.model = model

    @property
    def model_name(self) -> str:
        """The engine's name of the model."""
        return self.model.name

    def status(self) -> GenerationStatus:
        """Return how far it has come."""
        return self.queue.status()

    def statistics(self) -> RequestStatistics:
        """Return times and counts."""
        return self.queue.statistics()

    @property
    def is_done(self) -> bool:
        """Whether nothing can follow."""
        return self.queue.status().is_final

    def result(self, timeout: float | None = None) -> list[Generation]:
        """Block until its end and return its texts.

        A request that was interrupted returns what there is; an interrupted text's
        ``finish_reason`` is ``"interrupted"``.

        Raises:
            TimeoutError: If it has not ended after ``timeout`` seconds; it goes on.
            Exception: What it failed with.
        """
        timeout = check_timeout("timeout", timeout)
        if not self.queue.wait_for_end(timeout):
            raise TimeoutError(f"request {self.id} has not ended after {timeout} s")
        return self._texts()

    def __await__(self) -> Generator[Any, None, list[Generation]]:
        """Wait for its end and return its texts, as ``result``; cancelling that lets it go on."""
        yield from self.queue.await_end().__await__()
        return self._texts()

    def _texts(self) -> list[Generation]:
        if self.queue.error is not None:
            raise self.queue.error
        return self.queue.generations()

    def __repr__(self) -> str:
        return (
            f"<GenerationRequest {self.id} of {self.model_name!r}: {self.status().value}, "
            f"{self.queue.generated_length()} tokens>"
        )
