"""Tries over a vocabulary, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.trie.async_trie import AsyncTokenCharacterTrie
    from genlm_backend.trie.parallel import ParallelTokenCharacterTrie
    from genlm_backend.trie.sequential import TokenCharacterTrie

__all__ = ["AsyncTokenCharacterTrie", "ParallelTokenCharacterTrie", "TokenCharacterTrie"]

__getattr__, __dir__ = lazy_names(globals(), submodules=("async_impl", "base", "parallel"))
