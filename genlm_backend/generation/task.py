"""Task: rows of token ids that are continued together, and the tensor that comes of them."""

from __future__ import annotations

import contextlib
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from typing import final

import torch

from genlm_backend.errors import OutOfSlotsError
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.engine.request import GenerationRequest, GenerationStatus
from genlm_backend.generation.engine.served_model import ServedModel
from genlm_backend.generation.generated import Generation
from genlm_backend.generation.generation import make_drafts
from genlm_backend.generation.prompt import Prompt
from genlm_backend.runtime.together import together


@final
@dataclass(eq=False)
class Task:
    """A request of an engine for each of some rows, and one result of them all.

    Attributes:
        rows: The token ids as they were given, ``[batch, length]``.
        prompts: The prompt of each row.
        configs: The configuration of each row.
        pad_token_id: The token behind shorter texts.
        requests: The request of each row; none before ``submit``.
        result: What is waited for; it is settled once.
    """

    rows: torch.Tensor
    prompts: list[Prompt]
    configs: list[GenerationConfig]
    pad_token_id: int
    requests: list[GenerationRequest] = field(default_factory=list)
    result: Future[torch.Tensor] = field(default_factory=Future)

    def submit(self, served: ServedModel, timeout: float | None) -> None:
        """Start the requests, all with one submission, blocking until there is room.

        Raises:
            RequestQueueFullError: (``queue.Full``) If that took ``timeout`` seconds.
            ModelStateError: (``RuntimeError``) If the model takes no more requests.
        """
        drafts = {
            GenerationRequest(served, prompt.token_ids, config): make_drafts(
                served.lm, prompt, config
            )
            for prompt, config in zip(self.prompts, self.configs, strict=True)
        }
        self.requests = list(drafts)
        served.submit(drafts, timeout)
        served.loop.submit(self._complete())

    def interrupt(self) -> None:
        """Interrupt the requests that have not ended."""
        for request in self.requests:
            request.model.end(request, GenerationStatus.INTERRUPTED)

    def fail(self, error: BaseException) -> None:
        """Settle the result, unless it has been."""
        with contextlib.suppress(InvalidStateError):
            self.result.set_exception(error)

    def cancel(self) -> None:
        """Settle the result as one that is not wanted any more, unless it has been settled."""
        self.fail(CancelledError("the task was cancelled by shutdown()"))

    async def _complete(self) -> None:
        """Settle the result when all requests have ended, or the first has failed."""
        try:
            found = await together(map(_texts, self.requests))
            result = self._joined(found)
        except Exception as error:  # a future is settled
            self.interrupt()
            self.fail(error)
        except BaseException:
            self.interrupt()
            self.cancel()
            raise
        else:
            with contextlib.suppress(InvalidStateError):
                self.result.set_result(result)

    def _joined(self, found: list[list[Generation]]) -> torch.Tensor:
        """Return each row with its continuations, padded.

        Raises:
            OutOfSlotsError: If a text was interrupted, which only the lack of memory does to it.
        """
        if any(text.finish_reason == "interrupted" for texts in found for text in texts):
            raise OutOfSlotsError("the task's keys and values do not fit into the model's memory")
        texts = [
            (row, generation.token_ids)
            for row, generations in zip(self.rows, found, strict=True)
            for generation in generations
        ]
        longest = max(len(token_ids) for _, token_ids in texts)
        return torch.stack(
            [
                torch.cat(
                    [
                        row,
                        torch.tensor(
                            ids + [self.pad_token_id] * (longest - len(ids)), dtype=torch.int64
                        ),
                    ]
                )
                for row, ids in texts
            ]
        )


async def _texts(request: GenerationRequest) -> list[Generation]:
    return await request
