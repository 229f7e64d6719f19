"""What is generated: a token, a text, and what any piece of a text can be read as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final


class Piece(Protocol):
    """New tokens of a text, and the characters that are certain with them: what streams yield.

    ``generate``'s stream yields them as ``GeneratedToken``, one token each; an engine's streams and
    queues as ``GeneratedElements``, as many as there are.
    """

    @property
    def tokens(self) -> Sequence[GeneratedToken]:
        """Each new token with what was asked for of it."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Ids of the new tokens."""
        ...

    @property
    def token_id(self) -> int | None:
        """Id of the last new token; ``None`` where there are only characters."""
        ...

    @property
    def text(self) -> str:
        """Characters that are certain with the new tokens, never half of one."""
        ...

    @property
    def logprobs(self) -> list[float] | None:
        """Logarithms of the new tokens' probabilities, if asked for."""
        ...

    @property
    def logprob(self) -> float | None:
        """Logarithm of the last new token's probability, if asked for."""
        ...

    @property
    def index(self) -> int:
        """Number of the text among the ``n`` of its prompt."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """Why the text ends with the new tokens; ``None`` where it goes on."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Number of the prompt's tokens that an engine found in the prefix cache; else 0."""
        ...


@final
@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of a text, as it is generated. Can be read as every ``Piece``.

    Attributes:
        token_id: The token.
        text: The characters that are certain with it; those of several tokens may come together.
        logprob: The logarithm of the model's probability of it, if asked for.
        top_logprobs: The most probable tokens at its place and theirs, if asked for.
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
@dataclass(frozen=True, slots=True)
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

    @classmethod
    def of_tokens(
        cls, tokens: list[GeneratedToken], rest: str = "", score: float | None = None
    ) -> Generation:
        """Put a text together from its tokens, and ``rest`` of a text that was interrupted."""
        reason = tokens[-1].finish_reason if tokens else None
        return cls(
            token_ids=[token.token_id for token in tokens],
            text="".join(token.text for token in tokens) + rest,
            finish_reason=reason or "interrupted",
            tokens=tokens,
            score=score,
        )
