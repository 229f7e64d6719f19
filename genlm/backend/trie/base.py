"""Tries on the CPU, under their older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.trie.sequential import TokenCharacterTrie

__all__ = ["TokenCharacterTrie"]

__getattr__, __dir__ = lazy_names(globals())
