"""SessionEngine: what is needed of an engine that holds contexts as sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from genlm_backend.llm.vllm.completion import Completion
from genlm_backend.llm.vllm.sessions import Step


class SessionEngine(Protocol):
    """What is needed of an engine; ``engine.Engine`` is it over vLLM."""

    tokenizer: Any
    vocab_size: int
    max_length: int
    max_sessions: int
    block_size: int
    num_blocks: int
    num_steps: int
    completions: dict[str, Completion]

    def num_free_blocks(self) -> int:
        """Return how many blocks of keys and values nobody holds."""
        ...

    def add(self, step: Step) -> None:
        """Start or extend a session."""
        ...

    def run(self, session_ids: list[str], relieve: Callable[[], bool]) -> list[torch.Tensor]:
        """Compute the rows of these sessions; ``relieve`` makes room where there is none."""
        ...

    def release(self, session_ids: list[str]) -> None:
        """Give sessions up."""
        ...

    def reset(self) -> None:
        """Forget the blocks of sessions that were given up."""
        ...

    def start(self, completion: Completion, forbidden: frozenset[int]) -> None:
        """Begin a completion."""
        ...

    def step(self, relieve: Callable[[], bool]) -> None:
        """Make a step for the completions."""
        ...

    def stop(self, completions: list[Completion]) -> None:
        """Give completions up."""
        ...

    def add_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Remove a LoRA adapter that no session and no completion uses."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...
