"""SessionEngine: the interface of an engine that holds contexts as sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from genlm_backend.backends.vllm.completion import Completion
from genlm_backend.backends.vllm.sessions import Placement
from genlm_backend.model.query import Adapter
from genlm_backend.model.readout import RowQuestions
from genlm_backend.model.scoring import Scoring


class Scored(NamedTuple):
    """A text that an engine has scored.

    Attributes:
        scores: The log-probability of each target: float32 ``[num_targets]``.
        num_computed: Number of tokens that were computed for it.
        num_reused: Number of tokens whose keys and values were there.
        is_whole: Whether every target has been computed, and none was there.
    """

    scores: torch.Tensor
    num_computed: int
    num_reused: int
    is_whole: bool = True


class SessionEngine(Protocol):
    """An engine whose requests stay after their rows, as sessions; ``VLLMEngine`` is one.

    Attributes:
        tokenizer: What decodes the model's token ids.
        vocab_size: Width of the model's rows.
        max_length: Longest context that it takes, in tokens.
        max_sessions: Number of sessions and running completions that it has places for.
        block_size: Number of tokens whose keys and values a block holds.
        num_blocks: Number of blocks.
        kv_cache_dtype: Number format of these keys and values, in vLLM's words; ``None`` for the
            type that the model computes in.
        image_token_id: The id that stands for a part of a picture; ``None`` where none are read.
        eos_token_ids: The ids that end a text by the model's generation config; ``None`` where it
            names none.
        scores_texts: Whether a pass over a text gives its scores.
        processor: The processor of transformers that reads pictures, where they are.
        num_steps: Number of steps that have computed something.
        completions: The completions that have not ended, by their ids.
        has_died: Whether its process has ended.
    """

    tokenizer: Any
    vocab_size: int
    max_length: int
    max_sessions: int
    block_size: int
    num_blocks: int
    kv_cache_dtype: str | None
    image_token_id: int | None
    eos_token_ids: tuple[int, ...] | None
    scores_texts: bool
    num_steps: int
    completions: dict[str, Completion]
    has_died: bool

    @property
    def processor(self) -> Any:
        """The processor of transformers that reads pictures."""
        ...

    def read(self, prompt: str | list[int], images: list[Any]) -> tuple[list[int], list[Any]]:
        """Return the token ids of a prompt with pictures, and what its requests have of these.

        Each feature has the digest of what it shows (``identifier``), and its tokens' place
        (``mm_position``, with an ``offset`` and a ``length``).
        """
        ...

    def num_free_blocks(self) -> int:
        """Return how many blocks of keys and values nobody holds."""
        ...

    def add(self, placement: Placement) -> None:
        """Start or extend the session of ``placement``, which the next ``run`` computes."""
        ...

    def run(
        self,
        session_ids: list[str],
        relieve: Callable[[], bool],
        wanted: RowQuestions | None = None,
    ) -> dict[str, Any]:
        """Compute the rows of these sessions; ``relieve`` makes room where there is none.

        Returns:
            The rows by the sessions, without those that have found no room. They own their memory,
            on whatever device; or what is ``wanted`` of them, a list for each session, and no row
            comes out of another process that nobody asks for.
        """
        ...

    def score(self, texts: list[Scoring], relieve: Callable[[], bool]) -> list[Scored]:
        """Return the scores of texts, each computed in one pass; ``relieve`` as for ``run``."""
        ...

    def end(self, session_ids: list[str]) -> None:
        """End sessions, whether or not they have been computed."""
        ...

    def reset(self) -> None:
        """Forget all blocks, where no session is left; completions compute theirs again."""
        ...

    def start(
        self,
        completion: Completion,
        forbidden: frozenset[int],
        source: str | None = None,
        num_shared: int = 0,
    ) -> None:
        """Begin a completion, behind the first tokens of a session that has been computed.

        Args:
            completion: Prompt and settings of the sample.
            forbidden: Token ids that are never sampled.
            source: The session; ``None`` for none.
            num_shared: How many of the prompt's tokens it has.
        """
        ...

    def step(self, relieve: Callable[[], bool]) -> None:
        """Make a step for the completions."""
        ...

    def stop(self, completions: list[Completion]) -> None:
        """End completions before they are finished; their futures stay as they are."""
        ...

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load a LoRA adapter."""
        ...

    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove a LoRA adapter that no session and no completion uses."""
        ...

    def close(self) -> None:
        """Free what the engine holds; again has no effect."""
        ...
