"""Awaitable language models for programs that steer them.

``await lm.next_token_logprobs(token_ids)`` gives the full-vocabulary log-probabilities of the
next token. Concurrent awaits are batched, every prefix seen is reused, ``lm.byte_vocab`` holds
the exact bytes of every token id, and a trie over them turns log-probabilities into the weight
of every prefix of characters.
"""

import logging
from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.generation.async_glm import AsyncGLM
    from genlm_backend.generation.config import GenerationConfig
    from genlm_backend.generation.constraint import Constraint
    from genlm_backend.generation.engine import Engine
    from genlm_backend.generation.generation import generate, stream
    from genlm_backend.generation.multi_media import MultiMediaInfo
    from genlm_backend.llm.base import AsyncLM
    from genlm_backend.llm.context import Context
    from genlm_backend.llm.hf.model import AsyncTransformer
    from genlm_backend.llm.mlx.model import AsyncMlxLM
    from genlm_backend.llm.mock import MockAsyncLM
    from genlm_backend.llm.registry import load_model_by_name
    from genlm_backend.llm.replicas.model import AsyncReplicas
    from genlm_backend.llm.statistics import LMStatistics
    from genlm_backend.llm.vllm.model import AsyncVirtualLM
    from genlm_backend.tokenization.token import Token
    from genlm_backend.tokenization.vocab import decode_vocab
    from genlm_backend.trie.async_trie import AsyncTokenCharacterTrie
    from genlm_backend.trie.lm_weights import lm_trie_weights
    from genlm_backend.trie.parallel import ParallelTokenCharacterTrie
    from genlm_backend.trie.sequential import TokenCharacterTrie

__version__ = "0.5.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless somebody listens

__all__ = [
    "AsyncGLM",
    "AsyncLM",
    "AsyncMlxLM",
    "AsyncReplicas",
    "AsyncTokenCharacterTrie",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "Constraint",
    "Context",
    "Engine",
    "GenerationConfig",
    "LMStatistics",
    "MockAsyncLM",
    "MultiMediaInfo",
    "ParallelTokenCharacterTrie",
    "Token",
    "TokenCharacterTrie",
    "__version__",
    "decode_vocab",
    "generate",
    "lm_trie_weights",
    "load_model_by_name",
    "stream",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "AsyncGLM": "genlm_backend.generation.async_glm",
        "AsyncLM": "genlm_backend.llm.base",
        "AsyncMlxLM": "genlm_backend.llm.mlx.model",
        "AsyncTokenCharacterTrie": "genlm_backend.trie.async_trie",
        "AsyncReplicas": "genlm_backend.llm.replicas.model",
        "AsyncTransformer": "genlm_backend.llm.hf.model",
        "AsyncVirtualLM": "genlm_backend.llm.vllm.model",
        "Constraint": "genlm_backend.generation.constraint",
        "Context": "genlm_backend.llm.context",
        "Engine": "genlm_backend.generation.engine",
        "GenerationConfig": "genlm_backend.generation.config",
        "MultiMediaInfo": "genlm_backend.generation.multi_media",
        "LMStatistics": "genlm_backend.llm.statistics",
        "MockAsyncLM": "genlm_backend.llm.mock",
        "ParallelTokenCharacterTrie": "genlm_backend.trie.parallel",
        "Token": "genlm_backend.tokenization.token",
        "TokenCharacterTrie": "genlm_backend.trie.sequential",
        "decode_vocab": "genlm_backend.tokenization.vocab",
        "generate": "genlm_backend.generation.generation",
        "lm_trie_weights": "genlm_backend.trie.lm_weights",
        "load_model_by_name": "genlm_backend.llm.registry",
        "stream": "genlm_backend.generation.generation",
    },
    submodules=("cache", "errors", "generation", "llm", "tokenization", "trie"),
)
