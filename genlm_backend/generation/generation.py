"""generate and stream: texts of a model, token by token, beside whatever else it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import torch

from genlm_backend.errors import ContextError, GenerationConfigError
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.constraint import Constraint
from genlm_backend.generation.processors import make_processors, make_warpers
from genlm_backend.generation.text import Text
from genlm_backend.llm.base import AsyncLM, TokenIds
from genlm_backend.llm.sampling import Sampler
from genlm_backend.llm.together import together


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of a text, as it is generated.

    Attributes:
        token_id: The token.
        text: The characters that are certain with it; those of several tokens may come together.
        logprob: The logarithm of the model's probability of it, if asked for.
        top_logprobs: The most probable tokens at its place and theirs, if asked for.
        finish_reason: With the last token: ``"eos"``, ``"stop"`` (a stop string or list of ids, or
            a ``response_format`` that is complete), or ``"length"``; else ``None``.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated text.

    Attributes:
        token_ids: Its tokens, the one that ended it included.
        text: Its characters: without special tokens, cut off where a stop string begins.
        finish_reason: ``"eos"``, ``"stop"`` or ``"length"``.
        tokens: Each token with what was asked for of it.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    tokens: list[GeneratedToken]


async def generate(
    lm: AsyncLM, prompt: str | TokenIds, config: GenerationConfig | None = None
) -> list[Generation]:
    """Generate ``config.n`` texts after a prompt, all at the same time.

    Args:
        lm: The model; what else it is asked meanwhile shares its batches.
        prompt: A text, or token ids.
        config: How; by default greedily, to the model's limit.

    Raises:
        ContextError: (``ValueError``) If the prompt is empty, or leaves no room for a token.
        GenerationConfigError: (``ValueError``) If the configuration does not go with the model.
    """
    config = config or GenerationConfig()
    requests = [_Request(lm, prompt, config, stream) for stream in range(config.n)]

    async def run(request: _Request) -> Generation:
        tokens = [token async for token in request.run()]
        return Generation(
            token_ids=[token.token_id for token in tokens],
            text="".join(token.text for token in tokens),
            finish_reason=tokens[-1].finish_reason or "length",
            tokens=tokens,
        )

    return await together(map(run, requests))


async def stream(
    lm: AsyncLM, prompt: str | TokenIds, config: GenerationConfig | None = None
) -> AsyncIterator[GeneratedToken]:
    """Generate one text after a prompt, and yield its tokens as they come.

    Raises:
        GenerationConfigError: (``ValueError``) If ``n`` is not 1; otherwise as ``generate``.
    """
    config = config or GenerationConfig()
    if config.n != 1:
        raise GenerationConfigError(f"n must be 1 to stream, got {config.n}")
    async for token in _Request(lm, prompt, config, 0).run():
        yield token


def check_request(lm: AsyncLM, prompt: str | TokenIds, config: GenerationConfig) -> None:
    """Raise what ``generate`` would raise of this request before it asks the model anything."""
    _Request(lm, prompt, config, 0)


class _Request:
    """One text: awaits logits, processes them, chooses a token, and knows which is the last."""

    def __init__(
        self, lm: AsyncLM, prompt: str | TokenIds, config: GenerationConfig, stream: int
    ) -> None:
        self._lm, self._config = lm, config
        self._context = _prompt_ids(lm, prompt)
        self._prompt_length = len(self._context)
        self._eos = _eos_ids(lm, config)
        self._limit = self._max_length()
        for word in config.stop_words_ids:
            _check_ids("stop_words_ids", word, lm)
        self._processors = make_processors(config, self._prompt_length, sorted(self._eos))
        self._warpers = make_warpers(config)
        self._sampler = Sampler(1.0 if config.do_sample else 0.0, config.seed, stream)
        self._text = Text(config.stop)
        self._constraint = None
        if config.response_format is not None:
            self._constraint = Constraint.from_response_format(lm, config.response_format)

    def _max_length(self) -> int:
        """Tokens of prompt and text together, at most."""
        config, longest = self._config, getattr(self._lm, "max_length", None)
        limits = [
            None if config.max_new_tokens is None else self._prompt_length + config.max_new_tokens,
            config.max_length,
            None if longest is None else longest + 1,  # the last token is never a context
        ]
        known = [limit for limit in limits if limit is not None]
        if not known:
            raise GenerationConfigError(
                "max_new_tokens must be given: this model has no maximum of its own"
            )
        if min(known) <= self._prompt_length:
            raise ContextError(
                f"the prompt has {self._prompt_length} tokens and leaves no room for another: "
                f"prompt and text may have {min(known)} together"
            )
        return min(known)

    async def run(self) -> AsyncIterator[GeneratedToken]:
        finish_reason = None
        while finish_reason is None:
            logits = await self._next_logits()
            token_id = self._sampler.draw(self._warped(logits))
            self._context.append(token_id)
            new = self._advance(token_id)
            finish_reason = self._finish_reason(token_id)
            if finish_reason is not None and not self._text.is_stopped:
                new += self._text.end()
            yield GeneratedToken(
                token_id, new, *self._logprobs(token_id), finish_reason=finish_reason
            )

    async def _next_logits(self) -> torch.Tensor:
        """Return what the model says, processed, with what is not allowed at ``-inf``."""
        config, constraint = self._config, self._constraint
        ask = self._lm.next_token_logits(self._context, config.lora_name)
        if constraint is None:
            logits = await ask
        else:
            logits, mask = await asyncio.gather(ask, asyncio.to_thread(constraint.mask))
        self._row = logits.log_softmax(-1) if config.logprobs else None
        if self._processors:
            logits = self._apply(self._processors, logits)
        if constraint is not None:
            logits = logits.masked_fill(~mask.to(logits.device), -torch.inf)
        return logits

    def _warped(self, logits: torch.Tensor) -> torch.Tensor:
        return self._apply(self._warpers, logits) if self._warpers else logits

    def _apply(self, processors: object, logits: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor([self._context], device=logits.device)
        return processors(ids, logits[None])[0]  # pyright: ignore[reportCallIssue]

    def _advance(self, token_id: int) -> str:
        if self._constraint is not None:
            self._constraint.advance(token_id)
        is_silent = token_id in self._lm.special_ids or token_id in self._eos
        return "" if is_silent else self._text.add(self._lm.byte_vocab[token_id].byte_string)

    def _finish_reason(self, token_id: int) -> str | None:
        if token_id in self._eos:
            return "eos"
        generated = self._context[self._prompt_length :]
        ends_with_word = any(
            tuple(generated[-len(word) :]) == tuple(word) for word in self._config.stop_words_ids
        )
        if self._text.is_stopped or ends_with_word:
            return "stop"
        if self._constraint is not None and self._constraint.is_finished:
            return "stop"
        return "length" if len(self._context) >= self._limit else None

    def _logprobs(self, token_id: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        if self._row is None:
            return None, ()
        top = self._row.topk(min(self._config.top_logprobs, len(self._row)))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return float(self._row[token_id]), pairs


def _prompt_ids(lm: AsyncLM, prompt: str | TokenIds) -> list[int]:
    if isinstance(prompt, str):
        encode = getattr(lm.tokenizer, "encode", None)
        if encode is None:
            raise ContextError("the model's tokenizer cannot encode text: pass token ids")
        ids = encode(prompt)
        prompt = ids if isinstance(ids, list) else ids.ids
    ids = [int(i) for i in prompt]
    if not ids:
        raise ContextError("the prompt is empty: a context needs at least one token")
    _check_ids("prompt", ids, lm)
    return ids


def _eos_ids(lm: AsyncLM, config: GenerationConfig) -> frozenset[int]:
    if not config.early_stopping:
        return frozenset()
    given = config.eos_token_id
    eos = getattr(lm.tokenizer, "eos_token_id", None) if given is None else given
    ids = [eos] if isinstance(eos, int) else list(eos or ())
    _check_ids("eos_token_id", ids, lm)
    return frozenset(ids)


def _check_ids(name: str, ids: Sequence[int], lm: AsyncLM) -> None:
    for token_id in ids:
        if not 0 <= token_id < len(lm.byte_vocab):
            raise GenerationConfigError(
                f"{name} has {token_id}, which is outside the vocabulary of {len(lm.byte_vocab)}"
            )
