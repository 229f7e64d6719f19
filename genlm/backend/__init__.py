"""The import name of genlm-backend: every public name of 0.3.1, and of the release after it."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.backends.hf.async_transformer import AsyncTransformer
    from genlm_backend.backends.registry import load_model_by_name
    from genlm_backend.backends.vllm.async_virtual_lm import AsyncVirtualLM
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
    globals(), submodules=("batching", "cache", "draw", "llm", "tokenization", "trie")
)
