"""Tries over a vocabulary: sum, maximum or log-sum-exp of token weights under every prefix."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.trie.async_trie import AsyncTokenCharacterTrie, TrieStatistics
    from genlm_backend.trie.base import VocabularyTrie
    from genlm_backend.trie.lm_weights import lm_trie_weights
    from genlm_backend.trie.parallel import ParallelTokenCharacterTrie
    from genlm_backend.trie.sequential import TokenCharacterTrie

__all__ = [
    "AsyncTokenCharacterTrie",
    "ParallelTokenCharacterTrie",
    "TokenCharacterTrie",
    "TrieStatistics",
    "VocabularyTrie",
    "lm_trie_weights",
]

__getattr__, __dir__ = lazy_names(globals())
