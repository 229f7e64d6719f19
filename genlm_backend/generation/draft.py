"""Draft: texts of one prompt in the making, a token at a time."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.generated import GeneratedToken
from genlm_backend.generation.prompt import Prompt
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.query import TokenIds


class Draft(abc.ABC):
    """A generation in progress: contexts that a model is asked, and what its answers add to them.

    Until ``is_finished``: await ``read()``, then call ``write()``. Between the two calls a draft
    may rest for as long as anybody likes.

    Args:
        lm: The model.
        prompt: Checked.
        config: How.

    Attributes:
        contexts: The token ids of each text so far, prompt included; what is asked next.
        is_finished: Whether every text is complete.
    """

    def __init__(self, lm: AsyncLM, prompt: Prompt, config: GenerationConfig) -> None:
        self._lm, self._prompt, self._config = lm, prompt, config
        self.contexts: list[list[int]] = [list(prompt.token_ids)]
        self.is_finished = False

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Number of contexts asked at once, at most."""

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter that the contexts are read with."""
        return self._config.lora_name

    @abc.abstractmethod
    async def read(self) -> None:
        """Await what the model says of ``contexts``; nothing has changed if it is cancelled."""

    @abc.abstractmethod
    def write(self) -> list[tuple[int, GeneratedToken]]:
        """Choose the next token of each text; return the certain ones with their text's number."""

    @abc.abstractmethod
    def unwritten(self) -> list[tuple[int, GeneratedToken]]:
        """Return the tokens that ``write`` has not returned of texts that are not to go on."""

    @abc.abstractmethod
    def held_back(self) -> list[tuple[int, str]]:
        """Return, for each text that is not to go on, the characters held back at its end."""

    @abc.abstractmethod
    def scores(self) -> dict[int, float]:
        """Return the score of each text that has one, by its number."""

    def asked(self) -> list[TokenIds]:
        """Return ``contexts`` as a model is asked them."""
        return [*map(self.asked_of, self.contexts)]

    def asked_of(self, context: list[int]) -> TokenIds:
        """Return a context as a model is asked it, with the pictures that it begins with."""
        begin = self._prompt.context
        return context if begin.pictures is None else begin + context[len(begin) :]

    # ---------------------------------------------------------------- for the kinds of draft

    def _ends_with_stop_word(self, context: Sequence[int]) -> bool:
        generated = context[len(self._prompt.token_ids) :]
        words = self._config.stop_words_ids or ()
        return any(tuple(generated[-len(word) :]) == tuple(word) for word in words)

    @abc.abstractmethod
    def _is_end(self, token_id: int) -> bool:
        """Whether a token that has been written ends the text, and is none of it."""

    def _bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: none where it is special."""
        is_silent = token_id in self._lm.special_ids or self._is_end(token_id)
        return b"" if is_silent else self._lm.byte_vocab[token_id].byte_string

    def _logprobs(
        self, row: torch.Tensor | None, token_id: int
    ) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        if row is None:
            return None, ()
        top = row.topk(min(self._config.top_logprobs, len(row)))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return float(row[token_id]), pairs
