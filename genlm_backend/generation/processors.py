"""Processors of logits before a token is chosen: transformers' own, and two more."""

from __future__ import annotations

from typing import final

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from genlm_backend.generation.config import GenerationConfig


def make_processors(
    config: GenerationConfig, prompt_length: int, eos_token_ids: list[int]
) -> LogitsProcessorList:
    """Return the processors that a configuration asks for, in the order of ``model.generate``.

    Each takes the ids so far ``[1, n]`` and the logits ``[1, vocab]``, and returns logits.
    """
    made = LogitsProcessorList()
    if config.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(config.repetition_penalty)
        is_late = config.suppress_repetition_in_generation
        made.append(OfGenerated(penalty, prompt_length) if is_late else penalty)
    if config.no_repeat_ngram_size:
        made.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids:
        words = [list(word) for word in config.bad_words_ids]
        made.append(NoBadWordsLogitsProcessor(words, eos_token_ids or None))
    if config.min_length and eos_token_ids:
        made.append(MinLengthLogitsProcessor(config.min_length, eos_token_ids))
    if config.min_new_tokens and eos_token_ids:
        made.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, config.min_new_tokens, eos_token_ids)
        )
    if config.presence_penalty or config.frequency_penalty:
        counts = CountPenalty(config.presence_penalty, config.frequency_penalty)
        made.append(OfGenerated(counts, prompt_length))
    return made


@final
class OfGenerated(LogitsProcessor):
    """A processor that is shown the generated tokens only, and nothing while there are none."""

    def __init__(self, processor: LogitsProcessor, prompt_length: int) -> None:
        self._processor = processor
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the processed logits."""
        generated = input_ids[:, self._prompt_length :]
        return self._processor(generated, scores) if generated.shape[1] else scores  # pyright: ignore


@final
class CountPenalty(LogitsProcessor):
    """Takes from a logit once for being there before, and once for each time.

    As OpenAI's API defines presence and frequency penalties.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the processed logits."""
        counts = torch.zeros_like(scores).scatter_add_(
            1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype)
        )
        return scores - self._frequency * counts - self._presence * (counts > 0)  # pyright: ignore
