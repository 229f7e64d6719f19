"""Awaited tries, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.trie.async_trie import AsyncTokenCharacterTrie

__all__ = ["AsyncTokenCharacterTrie"]

__getattr__, __dir__ = lazy_names(globals())
