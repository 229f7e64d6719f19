"""BeamSearch: beam search with the scores and order of transformers' ``model.generate``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import final

import torch

from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.generated import GeneratedToken
from genlm_backend.generation.prompt import Prompt
from genlm_backend.generation.text_sequence import Text, TextSequence
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.readouts.draw import check_possible

_NEVER = -1.0e9
"""Initial score of all beams but the first, so that the first step extends only the first."""

LogProbs = tuple[float | None, tuple[tuple[int, float], ...]]


@final
@dataclass(frozen=True, slots=True)
class _Beam:
    """A beam: its context, its score, and its tokens' log-probabilities if requested."""

    context: list[int]
    score: float
    logprobs: tuple[LogProbs, ...] = ()


@final
class BeamSearch(TextSequence):
    """Searches with ``num_beams`` beams and returns the ``n`` texts with the best scores."""

    # Beam search (Lowerre, 1976): each step extends each beam by every token and keeps the best
    # that have not ended. The score of an ended text is its sum of log-probabilities / length **
    # ``length_penalty``; sum and length exclude the prompt (Wu et al., 2016, arXiv:1609.08144).
    # The operations run in float32 in the order of transformers' ``model.generate``, so that the
    # texts are the same. ``beam_early_stopping`` decides whether the search ends as soon as
    # ``num_beams`` texts have ended, or goes on while a beam may still beat the worst of them.
    def __init__(self, lm: AsyncLM, prompt: Prompt, config: GenerationConfig) -> None:
        super().__init__(lm, prompt, config)
        first = _Beam(list(prompt.token_ids), 0.0)
        self._beams = [first] + [_Beam(first.context, _NEVER)] * (config.num_beams - 1)
        self._ended: list[_Beam] = []
        self._rows: torch.Tensor | None = None
        # As in transformers: at least ``num_beams`` candidates do not end with an EOS token.
        self._num_candidates = max(2, 1 + len(prompt.eos_token_ids)) * config.num_beams

    async def ask(self) -> None:
        lora = self._config.lora_name
        contexts = map(self.asked_of, self.contexts)
        rows = await asyncio.gather(*(self._lm.next_token_logprobs(c, lora) for c in contexts))
        if len(rows) < len(self._beams):  # before the first token, ``contexts`` has one entry
            rows = rows * len(self._beams)
        self._rows = torch.stack(list(rows))

    def choose(self) -> list[GeneratedToken]:
        """Extend beams by a token; if the search ends, return the best texts' tokens, else none."""
        rows, beams, config = self._rows, self._beams, self._config
        assert rows is not None
        self._rows = None
        ids = torch.tensor([b.context for b in beams], dtype=torch.int64, device=rows.device)
        scores = self._processors(ids, rows.clone()) if self._processors else rows
        before = torch.tensor([b.score for b in beams], dtype=torch.float32, device=rows.device)
        scores = scores + before[:, None]
        found = scores.flatten().topk(min(self._num_candidates, scores.numel()))
        check_possible(float(found.values[0]))  # topk puts NaN first
        candidates: list[_Beam] = []
        for score, index in zip(found.values.tolist(), found.indices.tolist(), strict=True):
            number, token_id = divmod(index, rows.shape[1])
            beam = beams[number]
            own = self._told(rows[number], token_id) if config.logprobs else (None, ())
            candidates.append(_Beam([*beam.context, token_id], score, (*beam.logprobs, own)))
        ends = [self._reason(beam) is not None for beam in candidates]
        self._end([c for c, is_end in zip(candidates[: self.width], ends, strict=False) if is_end])
        open_beams = [c for c, is_end in zip(candidates, ends, strict=True) if not is_end]
        self._beams = open_beams[: self.width]
        self.contexts = [beam.context for beam in self._beams]
        if self._beams and self._can_improve():
            return []
        self.is_finished, best = True, self._ended[: self._config.n]
        self.scores = {number: beam.score for number, beam in enumerate(best)}
        return self._texts(best)

    def cut(self) -> tuple[list[GeneratedToken], dict[int, str]]:
        """Return the tokens of the ``n`` best texts so far, and an empty held-back text for each.

        If the search has ended, both results are empty, since ``choose`` has returned the texts.
        """
        if self.is_finished:
            return [], {}
        nothing_held_back = dict.fromkeys(range(self._config.n), "")
        if len(self.contexts[0]) == len(self._prompt.token_ids):
            return [], nothing_held_back
        self._end(self._beams)
        return self._texts(self._ended[: self._config.n]), nothing_held_back

    def _told(self, row: torch.Tensor, token_id: int) -> LogProbs:
        """Return the log-probabilities of a token and of the ``top_logprobs`` likeliest tokens."""
        top = row.topk(min(self._config.top_logprobs, len(row)))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return float(row[token_id]), pairs

    # ---------------------------------------------------------------- scores

    def _score(self, beam: _Beam, length: int) -> float:
        """Return the score that a beam would have if it ended at ``length``, prompt included."""
        penalty = (length - len(self._prompt.token_ids)) ** self._config.length_penalty
        return float(torch.tensor(beam.score, dtype=torch.float32) / penalty)

    def _end(self, beams: list[_Beam]) -> None:
        """Add beams to the ended texts, and keep the ``num_beams`` best of all of these."""
        scored = [replace(beam, score=self._score(beam, len(beam.context))) for beam in beams]
        self._ended = sorted([*self._ended, *scored], key=lambda beam: -beam.score)[: self.width]

    def _can_improve(self) -> bool:
        if len(self._ended) < self.width:
            return True
        best, stopping = self._beams[0], self._config.beam_early_stopping
        is_longest = stopping == "never" and self._config.length_penalty > 0
        length = self._prompt.max_length if is_longest else len(best.context)
        return stopping is not True and self._score(best, length) > self._ended[-1].score

    # ---------------------------------------------------------------- texts

    def _reason(self, beam: _Beam) -> str | None:
        text = Text(self._config.stop or ())
        if self._config.stop:
            text.add(b"".join(map(self._bytes, beam.context[len(self._prompt.token_ids) :])))
        return self._finish_reason(beam.context, text.is_stopped)

    def _texts(self, best: list[_Beam]) -> list[GeneratedToken]:
        return [token for i, beam in enumerate(best) for token in self._tokens(i, beam)]

    def _tokens(self, number: int, beam: _Beam) -> list[GeneratedToken]:
        text, tokens = Text(self._config.stop or ()), list[GeneratedToken]()
        generated = beam.context[len(self._prompt.token_ids) :]
        for token_id, own in zip(generated, beam.logprobs, strict=True):
            new = text.add(self._bytes(token_id))
            tokens.append(GeneratedToken(token_id, new, *own, None, number))
        rest = tokens[-1].text + ("" if text.is_stopped else text.end())
        reason = self._finish_reason(beam.context, text.is_stopped)
        return [*tokens[:-1], replace(tokens[-1], text=rest, finish_reason=reason)]
