"""Tries in torch, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.trie.parallel import ParallelTokenCharacterTrie

__all__ = ["ParallelTokenCharacterTrie"]

__getattr__, __dir__ = lazy_names(globals())
