"""Awaitable language models for programs that steer them.

``await lm.next_token_logprobs(token_ids)`` returns the full-vocabulary log-probabilities of the
next token. Concurrent awaits are batched, and cached prefixes are reused. ``lm.byte_vocab`` holds
the exact bytes of every token id, and a trie over these turns log-probabilities into the weight of
every prefix of bytes.
"""

import logging
from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.backends.hf.async_transformer import AsyncTransformer
    from genlm_backend.backends.llama_cpp.async_llama_cpp_lm import AsyncLlamaCppLM
    from genlm_backend.backends.mlx.async_mlx_lm import AsyncMlxLM
    from genlm_backend.backends.mock import MockAsyncLM
    from genlm_backend.backends.registry import load_model_by_name
    from genlm_backend.backends.vllm.async_virtual_lm import AsyncVirtualLM
    from genlm_backend.batching.batched import Batched, batched
    from genlm_backend.generation.async_glm import AsyncGLM
    from genlm_backend.generation.config import GenerationConfig, MultiMediaInfo
    from genlm_backend.generation.constraint import Constraint
    from genlm_backend.generation.engine.engine import Engine
    from genlm_backend.generation.generation import generate, generate_sync, stream
    from genlm_backend.generation.smc import WeightedTexts, smc, smc_sync
    from genlm_backend.model.async_lm import AsyncLM
    from genlm_backend.model.lm_statistics import LMStatistics
    from genlm_backend.particles.particle_group import ParticleGroup
    from genlm_backend.queries.context import Context
    from genlm_backend.remote.replicas.async_replicas import AsyncReplicas
    from genlm_backend.scoring.search import (
        Continuation,
        Continuations,
        PrefixLogprob,
        continuations,
        continuations_sync,
        prefix_logprob,
        prefix_logprob_sync,
    )
    from genlm_backend.scoring.surprisals import (
        Surprisal,
        Surprisals,
        SurprisalsOfTexts,
        surprisal,
        surprisal_sync,
    )
    from genlm_backend.tokenization.token import Token
    from genlm_backend.tokenization.vocab import decode_vocab
    from genlm_backend.trie.async_trie import AsyncTokenCharacterTrie
    from genlm_backend.trie.lm_weights import lm_trie_weights
    from genlm_backend.trie.parallel import ParallelTokenCharacterTrie
    from genlm_backend.trie.sequential import TokenCharacterTrie

__version__ = "0.5.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless logging is set up

__all__ = [
    "AsyncGLM",
    "AsyncLM",
    "AsyncLlamaCppLM",
    "AsyncMlxLM",
    "AsyncReplicas",
    "AsyncTokenCharacterTrie",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "Batched",
    "Constraint",
    "Context",
    "Continuation",
    "Continuations",
    "Engine",
    "GenerationConfig",
    "LMStatistics",
    "MockAsyncLM",
    "MultiMediaInfo",
    "ParallelTokenCharacterTrie",
    "ParticleGroup",
    "PrefixLogprob",
    "Surprisal",
    "Surprisals",
    "SurprisalsOfTexts",
    "Token",
    "TokenCharacterTrie",
    "WeightedTexts",
    "__version__",
    "batched",
    "continuations",
    "continuations_sync",
    "decode_vocab",
    "generate",
    "generate_sync",
    "lm_trie_weights",
    "load_model_by_name",
    "prefix_logprob",
    "prefix_logprob_sync",
    "smc",
    "smc_sync",
    "stream",
    "surprisal",
    "surprisal_sync",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    submodules=("errors", "generation", "llm", "resampling", "scoring", "tokenization", "trie"),
)
