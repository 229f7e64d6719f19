"""Keys, values and rows that have been computed already; no event loop, no model."""

from genlm_backend.cache.node import Match, Place, Run
from genlm_backend.cache.rows import RowCache
from genlm_backend.cache.slots import PADDING_SLOT, Slots
from genlm_backend.cache.store import KVLayout, KVStore, LayerLayout
from genlm_backend.cache.tree import PrefixTree

__all__ = [
    "PADDING_SLOT",
    "KVLayout",
    "KVStore",
    "LayerLayout",
    "Match",
    "Place",
    "PrefixTree",
    "RowCache",
    "Run",
    "Slots",
]
