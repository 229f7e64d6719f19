"""The results of generation: tokens, texts and pieces of texts, and a request's status."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias, final

from genlm_backend.readable import Readable


@final
@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token; a ``Piece``.

    Attributes:
        token_id: The token's id.
        text: The characters that this token completes. Before the last token, an incomplete
            character or a possible beginning of a stop string waits for a later token.
        logprob: The model's log-probability of the token, if requested.
        top_logprobs: The most probable tokens at its position, each an id and a log-probability,
            if requested.
        finish_reason: For the last token of a text, why it ends: ``"eos"``, ``"stop"`` (a stop
            string or list of ids, or a complete ``response_format``) or ``"length"``; else
            ``None``.
        index: Index of its text among the ``n`` texts of its prompt.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    index: int = 0

    @property
    def tokens(self) -> list[GeneratedToken]:
        """A list of this token alone."""
        return [self]

    @property
    def token_ids(self) -> list[int]:
        """A list of this token's id alone."""
        return [self.token_id]

    @property
    def logprobs(self) -> list[float] | None:
        """A list of this token's ``logprob`` alone, if requested."""
        return None if self.logprob is None else [self.logprob]

    @property
    def num_cached_tokens(self) -> int:
        """Always 0: only an engine counts prefix-cache hits."""
        return 0


@final
@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """A generated text.

    Attributes:
        token_ids: Its token ids, including the id of any token that ended it.
        text: Its characters, without special tokens, cut off before a stop string.
        finish_reason: ``"eos"``, ``"stop"`` or ``"length"``; in an engine, also ``"interrupted"``.
        tokens: Each token with the requested log-probabilities.
        score: For a beam, its log-probability / length ** ``length_penalty``; else ``None``.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    tokens: list[GeneratedToken]
    score: float | None = None

    def __repr__(self) -> str:
        score = "" if self.score is None else f", score {self.score:.3f}"
        number = len(self.token_ids)
        return f"Generation({self.text!r}, {self.finish_reason!r}, {number} tokens{score})"

    @classmethod
    def of_tokens(
        cls, tokens: list[GeneratedToken], rest: str = "", score: float | None = None
    ) -> Generation:
        """Join a text's tokens and ``rest``, the characters held back when the text ended."""
        reason = tokens[-1].finish_reason if tokens else None
        return cls(
            token_ids=[token.token_id for token in tokens],
            text="".join(token.text for token in tokens) + rest,
            finish_reason=reason or "interrupted",
            tokens=tokens,
            score=score,
        )


class GenerationStatus(enum.Enum):
    """The progress of a request. The last three values are final."""

    INIT = "init"
    """The request waits to run, or its prompt is being evaluated."""
    CONTEXT_FINISHED = "context finished"
    """The prompt has been evaluated."""
    GENERATING = "generating"
    """Some tokens have been generated, and more may follow."""
    FINISHED = "finished"
    """Every text is complete."""
    INTERRUPTED = "interrupted"
    """The request was stopped; its tokens so far can be read."""
    FAILED = "failed"
    """An exception ended the request; the queue yields unread tokens, then raises the exception."""

    @property
    def is_final(self) -> bool:
        """Whether the request has ended, so that its status no longer changes."""
        return self in (type(self).FINISHED, type(self).INTERRUPTED, type(self).FAILED)


@final
@dataclass(frozen=True, slots=True)
class GeneratedElements:
    """The new tokens of one text since the last read; a ``Piece``.

    Attributes:
        token_ids: The new tokens.
        text: The characters that these tokens complete.
        logprobs: The log-probabilities of the tokens, if requested.
        top_logprobs: The most probable tokens at each position, each an id and a log-probability,
            if requested.
        index: Index of the text among the ``n`` texts of the request.
        finish_reason: ``"eos"``, ``"stop"``, ``"length"`` or ``"interrupted"`` if the text ends
            with these tokens; else ``None``.
        num_cached_tokens: Prompt tokens that were found in the prefix cache.
        num_host_tokens: Cached prompt tokens that had to be copied from the cache's host tier.
        tokens: Each new token with the requested log-probabilities.
    """

    token_ids: list[int]
    text: str
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
    index: int = 0
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    tokens: list[GeneratedToken] = field(default_factory=list, repr=False)

    @property
    def prefix_len_gpu(self) -> int:
        """Prompt tokens that were found in the prefix cache on the model's device."""
        return self.num_cached_tokens - self.num_host_tokens

    @property
    def prefix_len_cpu(self) -> int:
        """Prompt tokens that were found in the host tier of the cache (``num_host_tokens``)."""
        return self.num_host_tokens

    @property
    def token_id(self) -> int | None:
        """Id of the last new token; ``None`` if the text ended without a new token."""
        return self.token_ids[-1] if self.token_ids else None

    @property
    def logprob(self) -> float | None:
        """The log-probability of the last new token, if requested."""
        return self.logprobs[-1] if self.logprobs else None


Piece: TypeAlias = GeneratedToken | GeneratedElements
"""The items that streams yield: new tokens of a text, and the characters that they complete.

Both types have ``tokens``, ``token_ids``, ``token_id``, ``text``, ``logprobs``, ``logprob``,
``index``, ``finish_reason`` and ``num_cached_tokens``. ``stream`` yields a ``GeneratedToken`` per
token; an engine's streams and queues yield ``GeneratedElements``, with all unread tokens of a text.
"""


@final
@dataclass(frozen=True, slots=True, repr=False)
class RequestStatistics(Readable):
    """Times and counts of a request. Times are in seconds; ``None`` if not known yet.

    Attributes:
        time_in_queue: From its start until its first query to the model.
        time_to_first_token: From its start until its first token.
        time_per_token: Time from its first to its last token, divided by n - 1, where n is
            the length of its longest text (the texts of a request are generated concurrently).
        time_in_total: From its start until it ended, or until now.
        num_prompt_tokens: Tokens of the prompt.
        num_generated_tokens: Tokens generated, in all texts.
        num_cached_tokens: Prompt tokens that were found in the prefix cache.
    """

    time_in_queue: float | None
    time_to_first_token: float | None
    time_per_token: float | None
    time_in_total: float
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
