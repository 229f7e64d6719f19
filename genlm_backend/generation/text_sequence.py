"""TextSequence: generates texts after a prompt, step by step; Sample: a sampled or greedy text."""

from __future__ import annotations

import abc
import asyncio
import codecs
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast, final

import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from genlm_backend.errors import ConstraintError
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.constraint import Constraint
from genlm_backend.generation.generated import GeneratedToken
from genlm_backend.generation.prompt import Prompt
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.query import NO_QUERY, TokenIds
from genlm_backend.readouts.draw import Draw
from genlm_backend.readouts.sample_readout import SampleReadout, SamplingFilter
from genlm_backend.readouts.sampling import Sampler
from genlm_backend.readouts.token_readouts import Top
from genlm_backend.runtime.together import together


class TextSequence(abc.ABC):
    """Generates texts: repeat ``await ask()``, then ``choose()``, until ``is_finished``."""

    def __init__(self, lm: AsyncLM, prompt: Prompt, config: GenerationConfig) -> None:
        self._lm, self._prompt, self._config = lm, prompt, config
        self.contexts: list[list[int]] = [list(prompt.token_ids)]
        self.width, self.lora_name = config.num_beams, config.lora_name
        self.max_length = prompt.max_length
        self.is_finished = False
        self.scores: dict[int, float] = {}
        self._constraint = None if prompt.constraint is None else prompt.constraint.fork()
        # With a constraint, the mask enforces the minimum lengths: a logits processor would also
        # forbid EOS tokens that the constraint allows inside a text.
        if prompt.constraint is not None:
            config = config.replace(min_length=0, min_new_tokens=0)
        eos = sorted(prompt.eos_token_ids)
        self._processors = make_processors(config, len(prompt.token_ids), eos)

    @abc.abstractmethod
    async def ask(self) -> None:
        """Query the model for ``contexts``; to be awaited once before each ``choose()``."""

    @abc.abstractmethod
    def choose(self) -> list[GeneratedToken]:
        """Choose the next token of each text; return tokens that cannot change any more."""

    @abc.abstractmethod
    def cut(self) -> tuple[list[GeneratedToken], dict[int, str]]:
        """Cut the texts off; return tokens not yet returned, and each text's held-back part."""

    def asked_of(self, context: list[int]) -> TokenIds:
        """Return ``context``, which begins with the prompt, with any pictures of the prompt."""
        begin = self._prompt.context
        return context if begin.pictures is None else begin + context[len(begin) :]

    # ---------------------------------------------------------------- for subclasses

    def _finish_reason(self, context: list[int], is_stopped: bool) -> str | None:
        if context[-1] in self._prompt.eos_token_ids and self._is_end(context[-1]):
            return "eos"
        generated = context[len(self._prompt.token_ids) :]
        words = self._config.stop_words_ids or ()
        if is_stopped or any(generated[-len(word) :] == [*word] for word in words):
            return "stop"
        return "length" if len(context) >= self.max_length else None

    def _is_end(self, token_id: int) -> bool:
        """Return whether a token ends its text; with a constraint, pass only the latest token."""
        if self._constraint is not None:
            return self._constraint.is_ended
        return token_id in self._prompt.eos_token_ids

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text: none if special or ending the text."""
        is_silent = token_id in self._lm.special_ids or self._is_end(token_id)
        return b"" if is_silent else self._lm.byte_vocab[token_id].byte_string


@final
class Text:
    """Decodes bytes to whole characters; holds back a possible beginning of a stop string."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = bytearray()
        self._num_shown = 0
        self.is_stopped = False

    def add(self, new: bytes) -> str:
        """Add a token's bytes; return further characters that no stop string can still cut off."""
        begin = max(0, len(self._bytes) - self._longest + 1)
        self._bytes += new
        found = [self._bytes.find(stop, begin) for stop in self._stops]
        ends = [position for position in found if position >= 0]
        if ends:
            self.is_stopped = True
            del self._bytes[min(ends) :]
            return self.end()
        # Hold back the longest suffix of the text that is a prefix of a stop string.
        sizes = range(min(self._longest - 1, len(self._bytes)), 0, -1)
        held = (n for n in sizes if any(s.startswith(self._bytes[-n:]) for s in self._stops))
        return self._show(len(self._bytes) - next(held, 0))

    def end(self) -> str:
        """Return the held-back characters; an incomplete one becomes U+FFFD."""
        return self._show(len(self._bytes)) + self._decoder.decode(b"", final=True)

    def _show(self, end: int) -> str:
        # Characters that ``add`` has returned already cannot be taken back.
        end = max(end, self._num_shown)
        shown = self._decoder.decode(bytes(self._bytes[self._num_shown : end]))
        self._num_shown = end
        return shown


@final
class Sample(TextSequence):
    """A sampled or greedy text, drawn by the model unless logits are processed or masked here."""

    def __init__(
        self, lm: AsyncLM, prompt: Prompt, config: GenerationConfig, number: int, stream: int
    ) -> None:
        super().__init__(lm, prompt, config)
        self._number = number
        self._least = max(config.min_length, len(prompt.token_ids) + config.min_new_tokens)
        temperature = 1.0 if config.temperature is None else config.temperature
        self._sampler = Sampler(temperature if config.is_sampled else 0.0, config.seed, stream)
        top_p = 1.0 if config.top_p is None else config.top_p
        cuts = SamplingFilter(config.top_k or 0, top_p, config.min_p or 0.0)
        self._cuts = cuts if config.is_sampled and cuts != SamplingFilter() else None
        self._text = Text(config.stop or ())
        self._drawn: Draw | None = None
        self._top: tuple[tuple[int, float], ...] = ()

    async def ask(self) -> None:
        """Let the model draw a token, or draw one here from processed or masked logits."""
        context, lora_name = self.asked_of(self.contexts[0]), self._config.lora_name
        drawing = partial(
            SampleReadout,
            temperature=self._sampler.temperature,
            uniforms=(self._sampler.uniform(),),
            may_fail=True,
            cuts=self._cuts,
        )
        top = partial(Top, k=min(self._config.top_logprobs, len(self._lm.byte_vocab)))
        if self._processors or self._constraint is not None:
            asked = self._lm.next_token_logits(context, lora_name)
            # A thread computes the constraint's mask during the model's forward pass.
            logits, allowed = await asyncio.gather(asked, self._allowed())
            row = logits.log_softmax(-1)
            processed = row
            if self._processors:
                ids = torch.tensor([self.contexts[0]], dtype=torch.int64, device=logits.device)
                processed = self._processors(cast(Any, ids), cast(Any, logits[None]))[0]
            (drawn,) = drawing(NO_QUERY, allowed=allowed).of_logprobs(processed)
            drawn = drawn._replace(logprob=float(row[drawn.token_id]))
            found = top(NO_QUERY).of_logprobs(row) if self._config.top_logprobs else None
        elif self._config.top_logprobs:  # two readouts of one row
            asked = (self._lm.read(context, each, lora_name) for each in (drawing, top))
            (drawn,), found = await together(asked)
        else:
            (drawn,), found = await self._lm.read(context, drawing, lora_name), None
        self._drawn = drawn
        if found is not None:
            pairs = zip(found.token_ids.tolist(), found.logprobs.tolist(), strict=True)
            self._top = tuple(pairs)

    async def _allowed(self) -> bytes | None:
        """Return the constraint's mask, one bit per token; ``None`` without a constraint."""
        if self._constraint is None:
            return None
        may_end = len(self.contexts[0]) >= self._least
        (mask,) = await asyncio.to_thread(Constraint.masks, [self._constraint], may_end=may_end)
        return mask.bits

    def choose(self) -> list[GeneratedToken]:
        drawn, context = self._drawn, self.contexts[0]
        assert drawn is not None
        self._drawn = None
        if drawn.token_id < 0:
            raise ConstraintError(
                f"no token may follow the {len(context)} tokens so far: a constraint, "
                "bad_words_ids, no_repeat_ngram_size, min_length or min_new_tokens leaves no "
                "token with a probability above 0"
            )
        token_id = drawn.token_id
        context.append(token_id)
        if self._constraint is not None:
            self._constraint.advance(token_id)
        new = self._text.add(self._bytes(token_id))
        is_stopped = self._text.is_stopped
        if self._constraint is not None:  # if only an EOS may follow, it is not drawn
            is_stopped |= self._constraint.is_ended or self._constraint.must_end
        reason = self._finish_reason(context, is_stopped)
        if reason is not None:
            self.is_finished = True
            new += "" if self._text.is_stopped else self._text.end()
        logprob = drawn.logprob if self._config.logprobs else None
        return [GeneratedToken(token_id, new, logprob, self._top, reason, self._number)]

    def cut(self) -> tuple[list[GeneratedToken], dict[int, str]]:
        """Return no tokens, since ``choose`` has returned all, and any held-back characters."""
        return [], {} if self.is_finished else {self._number: self._text.end()}


def make_processors(
    config: GenerationConfig, prompt_length: int, eos_token_ids: list[int]
) -> LogitsProcessorList:
    """Return a configuration's logits processors: first transformers', then OpenAI's penalties."""
    made = LogitsProcessorList()  # called with ids [texts, length] and scores [texts, vocab]
    if config.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(config.repetition_penalty)
        is_late = config.suppress_repetition_in_generation
        made.append(_OfGenerated(penalty, prompt_length) if is_late else penalty)
    if config.no_repeat_ngram_size:
        made.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids:
        words = [list(word) for word in config.bad_words_ids]
        made.append(NoBadWordsLogitsProcessor(words, eos_token_ids or None))
    least = max(config.min_length, prompt_length + config.min_new_tokens)
    if least > prompt_length and eos_token_ids:
        made.append(MinLengthLogitsProcessor(least, eos_token_ids))
    if config.presence_penalty or config.frequency_penalty:
        counts = partial(_less_for_counts, config.presence_penalty, config.frequency_penalty)
        made.append(_OfGenerated(counts, prompt_length))
    return made


@final
class _OfGenerated:
    """Calls a logits processor with only the generated ids; without any, scores do not change."""

    # Not a partial: transformers inspects signatures at each token, and a partial's takes 0.3 ms.

    def __init__(self, processor: Callable[..., Any], prompt_length: int) -> None:
        self._processor = processor
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        generated = input_ids[:, self._prompt_length :]
        return self._processor(generated, scores) if generated.shape[1] else scores


def _less_for_counts(presence: float, frequency: float, input_ids: Any, scores: Any) -> Any:
    """Return ``scores`` minus OpenAI's penalties for the tokens in ``input_ids``."""
    ones = torch.ones_like(input_ids, dtype=scores.dtype)
    counts = torch.zeros_like(scores).scatter_add_(1, input_ids, ones)
    return scores - frequency * counts - presence * (counts > 0)
