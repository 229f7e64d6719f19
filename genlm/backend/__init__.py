"""The import name of genlm-backend 0.3.1: every public name of it, from ``genlm_backend``."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.llm.hf.model import AsyncTransformer
    from genlm_backend.llm.registry import load_model_by_name
    from genlm_backend.llm.vllm.model import AsyncVirtualLM
    from genlm_backend.tokenization.token import Token
    from genlm_backend.tokenization.vocab import decode_vocab
    from genlm_backend.trie.async_trie import AsyncTokenCharacterTrie
    from genlm_backend.trie.parallel import ParallelTokenCharacterTrie
    from genlm_backend.trie.sequential import TokenCharacterTrie

__all__ = [
    "AsyncTokenCharacterTrie",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "ParallelTokenCharacterTrie",
    "Token",
    "TokenCharacterTrie",
    "decode_vocab",
    "load_model_by_name",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "AsyncTokenCharacterTrie": "genlm_backend.trie.async_trie",
        "AsyncTransformer": "genlm_backend.llm.hf.model",
        "AsyncVirtualLM": "genlm_backend.llm.vllm.model",
        "ParallelTokenCharacterTrie": "genlm_backend.trie.parallel",
        "Token": "genlm_backend.tokenization.token",
        "TokenCharacterTrie": "genlm_backend.trie.sequential",
        "decode_vocab": "genlm_backend.tokenization.vocab",
        "load_model_by_name": "genlm_backend.llm.registry",
    },
    submodules=("cache", "llm", "tokenization", "trie"),
)
