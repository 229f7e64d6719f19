"""Sample: one text, token after token, drawn or the most probable."""

from __future__ import annotations

import asyncio
from typing import Any, final

import torch

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.draft import Draft, Text
from genlm_backend.generation.generated import GeneratedToken
from genlm_backend.generation.processors import make_warpers
from genlm_backend.generation.prompt import Prompt
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.sampling import Sampler


@final
class Sample(Draft):
    """One text: awaits logits, processes them, chooses a token, and knows which is the last.

    Args:
        lm: The model.
        prompt: Checked.
        config: How.
        number: Number of the text among those of the prompt, and of its random stream.
    """

    def __init__(
        self, lm: AsyncLM, prompt: Prompt, config: GenerationConfig, number: int = 0
    ) -> None:
        super().__init__(lm, prompt, config)
        self._number = number
        self._least = max(config.min_length, len(prompt.token_ids) + config.min_new_tokens)
        self._warpers = make_warpers(config)
        temperature = 1.0 if self._warpers else config.temperature
        self._sampler = Sampler(temperature if config.do_sample else 0.0, config.seed, number)
        self._text = Text(config.stop or ())
        self._constraint = None if prompt.constraint is None else prompt.constraint.fork()
        self._logits: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    async def ask(self) -> None:
        """Await the logits, and what the constraint allows meanwhile."""
        asked = self._lm.next_token_logits(self.asked()[0], self._config.lora_name)
        if self._constraint is None:
            self._logits = await asked
        else:
            may_end = len(self.contexts[0]) >= self._least
            mask = asyncio.to_thread(self._constraint.mask, may_end=may_end)
            self._logits, self._mask = await asyncio.gather(asked, mask)

    def choose(self) -> list[tuple[int, GeneratedToken]]:
        """Choose a token."""
        logits, context = self._logits, self.contexts[0]
        assert logits is not None
        self._logits = None
        row = logits.log_softmax(-1) if self._config.logprobs else None
        logits = self._apply(self._processors, logits)
        if self._mask is not None:
            logits = logits.masked_fill(~self._mask.to(logits.device), -torch.inf)
        if logits.max() == -torch.inf:
            raise ConstraintError(f"no token may follow the {len(context)} that there are")
        token_id = self._sampler.draw(self._apply(self._warpers, logits))
        context.append(token_id)
        if self._constraint is not None:
            self._constraint.advance(token_id)
        new = self._text.add(self._bytes(token_id))
        reason = self._finish_reason(token_id)
        if reason is not None:
            self.is_finished = True
            new += "" if self._text.is_stopped else self._text.end()
        logprob, top = self._logprobs(row, token_id)
        return [(self._number, GeneratedToken(token_id, new, logprob, top, reason, self._number))]

    def cut(self) -> tuple[list[tuple[int, GeneratedToken]], list[tuple[int, str]]]:
        """Return no token, as ``choose`` has returned them all, and the characters held back."""
        return [], [] if self.is_finished else [(self._number, self._text.end())]

    def _apply(self, processors: Any, logits: torch.Tensor) -> torch.Tensor:
        if not processors:
            return logits
        ids = torch.tensor([self.contexts[0]], dtype=torch.int64, device=logits.device)
        return processors(ids, logits[None])[0]

    def _is_end(self, token_id: int) -> bool:
        return super()._is_end(token_id) if self._constraint is None else self._constraint.is_ended

    def _finish_reason(self, token_id: int) -> str | None:
        if token_id in self._prompt.eos_token_ids and self._is_end(token_id):
            return "eos"
        is_stopped = self._text.is_stopped or self._ends_with_stop_word(self.contexts[0])
        if self._constraint is not None:  # its text is whole; nobody weighs its end here
            is_stopped |= self._constraint.is_ended or self._constraint.must_end
        if is_stopped:
            return "stop"
        return "length" if len(self.contexts[0]) >= self._prompt.max_length else None
