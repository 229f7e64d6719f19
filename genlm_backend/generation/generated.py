"""Generated tokens, texts and pieces of texts; and the status of a request for them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias, final

from genlm_backend.readable import Readable


@final
@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of a text, as it is generated. It is a ``Piece``.

    Attributes:
        token_id: The token.
        text: The characters that are certain with it; those of several tokens may come together.
        logprob: The logarithm of the model's probability of it, if asked for.
        top_logprobs: The most probable tokens at its position and theirs, if asked for.
        finish_reason: Why the text ends, with its last token: ``"eos"``, ``"stop"`` (a stop string
            or list of ids, or a ``response_format`` that is complete), or ``"length"``; else
            ``None``.
        index: The number of its text among the ``n`` of its prompt.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    index: int = 0

    @property
    def tokens(self) -> list[GeneratedToken]:
        """The token alone."""
        return [self]

    @property
    def token_ids(self) -> list[int]:
        """The token's id alone."""
        return [self.token_id]

    @property
    def logprobs(self) -> list[float] | None:
        """The token's ``logprob`` alone, if asked for."""
        return None if self.logprob is None else [self.logprob]

    @property
    def num_cached_tokens(self) -> int:
        """Always 0: only an engine counts the tokens that it finds in the prefix cache."""
        return 0


@final
@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """A generated text.

    Attributes:
        token_ids: Its tokens, the one that ended it included.
        text: Its characters: without special tokens, cut off where a stop string begins.
        finish_reason: ``"eos"``, ``"stop"``, ``"length"``, or ``"interrupted"`` by an engine.
        tokens: Each token with what was asked for of it.
        score: The log-probability of a beam, divided by its length to the power of
            ``length_penalty``; ``None`` where it is none.
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
        """Join the tokens of a text, and ``rest`` of one that was interrupted."""
        reason = tokens[-1].finish_reason if tokens else None
        return cls(
            token_ids=[token.token_id for token in tokens],
            text="".join(token.text for token in tokens) + rest,
            finish_reason=reason or "interrupted",
            tokens=tokens,
            score=score,
        )


class GenerationStatus(enum.Enum):
    """How far a request has come. The last three are final."""

    INIT = "init"
    """It waits to run, or for its prompt to be computed."""
    CONTEXT_FINISHED = "context finished"
    """The prompt has been computed."""
    GENERATING = "generating"
    """There are tokens, and there will be more."""
    FINISHED = "finished"
    """Every text is complete."""
    INTERRUPTED = "interrupted"
    """It was stopped; what there is can be read."""
    FAILED = "failed"
    """An exception ended it; what there is can be read before it is raised."""

    @property
    def is_final(self) -> bool:
        """Whether nothing will follow."""
        return self in (type(self).FINISHED, type(self).INTERRUPTED, type(self).FAILED)


@final
@dataclass(frozen=True, slots=True)
class GeneratedElements:
    """The part of one text since it was last asked for. It is a ``Piece``.

    Attributes:
        token_ids: The new tokens.
        text: The characters that are certain with them, never half of one.
        logprobs: The logarithms of the tokens' probabilities, if asked for.
        top_logprobs: The most probable tokens at each position and theirs, if asked for.
        index: The number of the text among the ``n`` of the request.
        finish_reason: ``"eos"``, ``"stop"``, ``"length"`` or ``"interrupted"`` where the text ends
            with these; else ``None``.
        num_cached_tokens: Tokens of the prompt that were found in the prefix cache.
        num_host_tokens: Tokens among these that were on the host, and had to be fetched.
        tokens: Each new token with what was asked for of it.
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
        """Tokens of the prompt that were found in the cache on the model's device."""
        return self.num_cached_tokens - self.num_host_tokens

    @property
    def prefix_len_cpu(self) -> int:
        """Tokens of the prompt that were found in the cache on the host (``num_host_tokens``)."""
        return self.num_host_tokens

    @property
    def token_id(self) -> int | None:
        """The last new token; ``None`` where there are only characters."""
        return self.token_ids[-1] if self.token_ids else None

    @property
    def logprob(self) -> float | None:
        """The logarithm of the last new token's probability, if asked for."""
        return self.logprobs[-1] if self.logprobs else None


Piece: TypeAlias = GeneratedToken | GeneratedElements
"""New tokens of a text, and the characters that are certain with them: what streams yield.

Both kinds have ``tokens``, ``token_ids``, ``token_id``, ``text``, ``logprobs``, ``logprob``,
``index``, ``finish_reason`` and ``num_cached_tokens``. ``stream`` yields ``GeneratedToken``, one
token each; an engine's streams and queues ``GeneratedElements``, as many as there are.
"""


@final
@dataclass(frozen=True, slots=True, repr=False)
class RequestStatistics(Readable):
    """Times and counts of a request. Times are in seconds, and ``None`` before their event.

    Attributes:
        time_in_queue: From its start until the model was first asked.
        time_to_first_token: From its start until its first token.
        time_per_token: Between a text's tokens after its first, on average; texts of one request
            come at the same time.
        time_in_total: From its start until it ended, or until now.
        num_prompt_tokens: Tokens of the prompt.
        num_generated_tokens: Tokens generated, of all texts.
        num_cached_tokens: Tokens of the prompt that were found in the prefix cache.
    """

    time_in_queue: float | None
    time_to_first_token: float | None
    time_per_token: float | None
    time_in_total: float
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
