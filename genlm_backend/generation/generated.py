"""What is generated: a token, and a text."""

from __future__ import annotations

from dataclasses import dataclass


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
        finish_reason: ``"eos"``, ``"stop"``, ``"length"``, or ``"interrupted"`` by an engine.
        tokens: Each token with what was asked for of it.
        score: Of a beam: its log-probability, divided by its length to the power of
            ``length_penalty``; else ``None``.
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
