"""What is measured: this library and its peers, each behind the same two methods.

Every system runs in a process of its own, so that none inherits another's threads or memory.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from genlm_backend.backends.bundled import bundled_directory

TEXT = (
    "Sequential Monte Carlo methods are a set of algorithms that estimate the state of a system "
    "over time from noisy observations, by keeping a population of weighted particles that are "
    "moved, weighed and resampled at every step, so that the heavy ones survive and the light "
    "ones die out."
)
PROMPT_TOKENS = 51


def load_hf() -> tuple[Any, Any]:
    """SmolLM2-135M in float32 on the device, and its tokenizer, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = bundled_directory("smollm2")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.to(DEVICE[0]), AutoTokenizer.from_pretrained(path)


DEVICE = ["cpu"]
"""Where models are measured: what ``--device`` says."""


def tensor_on(model: Any, values: Any) -> torch.Tensor:
    """Return a tensor where the model is."""
    return torch.tensor(values, device=model.device)


def draw(row: torch.Tensor, random: np.random.Generator) -> int:
    """Sample a token the same way for every system that hands out rows."""
    cumulative = np.exp(row.cpu().numpy()).cumsum(dtype=np.float64)
    return int(np.searchsorted(cumulative, random.random() * cumulative[-1]))


class System(ABC):
    """One way to sample continuations of a prompt."""

    @abstractmethod
    def start(self, num_particles: int) -> list[int]:
        """Load the model; return the prompt."""

    @abstractmethod
    def sample(self, prompt: list[int], num_particles: int, num_tokens: int, seed: int) -> int:
        """Sample from a clean state; return how many tokens were sampled."""


class RowSystem(System):
    """A system that is awaited for rows, particle by particle."""

    lm: Any

    async def _particle(self, prompt: list[int], num_tokens: int, seed: int) -> None:
        random, context = np.random.default_rng(seed), list(prompt)
        for _ in range(num_tokens):
            context.append(draw(await self.lm.next_token_logprobs(context), random))

    def sample(self, prompt: list[int], num_particles: int, num_tokens: int, seed: int) -> int:
        async def main() -> None:
            await asyncio.gather(
                *(self._particle(prompt, num_tokens, 1000 * seed + i) for i in range(num_particles))
            )

        self.reset(prompt)
        asyncio.run(main())
        return num_particles * num_tokens

    def reset(self, prompt: list[int]) -> None:
        self.lm.clear_cache()


class Ours(RowSystem):
    def start(self, num_particles: int) -> list[int]:
        from genlm_backend import AsyncTransformer

        self.lm = AsyncTransformer(*load_hf(), batch_size=num_particles)
        return self.lm.tokenizer.encode(TEXT)[:PROMPT_TOKENS]


class Peer(RowSystem):
    def start(self, num_particles: int) -> list[int]:
        from genlm.backend.llm import AsyncTransformer

        model, tokenizer = load_hf()
        self.lm = AsyncTransformer(model, tokenizer, batch_size=num_particles)
        return tokenizer.encode(TEXT)[:PROMPT_TOKENS]


class PeerCached(Peer):
    """The peer with its manual ``cache_kv(prompt)``, whose time counts."""

    def reset(self, prompt: list[int]) -> None:
        self.lm.clear_cache()
        self.lm.cache_kv(prompt)


class Generate(System):
    """transformers' own ``generate`` with the same batch."""

    def start(self, num_particles: int) -> list[int]:
        self.model, tokenizer = load_hf()
        return tokenizer.encode(TEXT)[:PROMPT_TOKENS]

    def sample(self, prompt: list[int], num_particles: int, num_tokens: int, seed: int) -> int:
        torch.manual_seed(seed)
        ids = tensor_on(self.model, [prompt] * num_particles)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )
        return output[:, len(prompt) :].numel()


class ContinuousBatching(Generate):
    """transformers' own continuous batching, with its paged attention."""

    def sample(self, prompt: list[int], num_particles: int, num_tokens: int, seed: int) -> int:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        torch.manual_seed(seed)
        config = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=-1,
            pad_token_id=0,
        )
        found = self.model.generate_batch(
            [prompt] * num_particles,
            generation_config=config,
            # By default it takes nine tenths of the machine's free memory for itself.
            continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.1),
            progress_bar=False,
        )
        return sum(len(output.generated_tokens) for output in found.values())


SYSTEMS: dict[str, type[System]] = {
    "genlm_backend": Ours,
    "peer": Peer,
    "peer + cache_kv": PeerCached,
    "generate": Generate,
    "continuous batching": ContinuousBatching,
}
