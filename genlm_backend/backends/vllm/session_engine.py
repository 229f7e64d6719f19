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
    """A text that an engine has scored."""

    scores: torch.Tensor  # [num_targets] float32
    num_computed: int
    num_reused: int
    is_whole: bool = True


class SessionEngine(Protocol):
    """An engine whose requests stay after their rows, as sessions; ``VLLMEngine`` is one."""

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
        """Return how many blocks of keys and values are free."""
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
        """Compute the rows of these sessions; ``relieve`` makes room if there is none."""
        ...

    def score(self, texts: list[Scoring], relieve: Callable[[], bool]) -> list[Scored]:
        """Return the scores of texts, each computed in one pass; ``relieve`` as for ``run``."""
        ...

    def end(self, session_ids: list[str]) -> None:
        """End sessions, whether or not they have been computed."""
        ...

    def reset(self) -> None:
        """Forget all blocks, once no session is left; completions compute theirs again."""
        ...

    def start(
        self,
        completion: Completion,
        forbidden: frozenset[int],
        source: str | None = None,
        num_shared: int = 0,
    ) -> None:
        """Begin a completion, after the first tokens of a session that has been computed."""
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
