"""Keys, values and rows that have been computed already; no event loop, no model."""

from genlm_backend.cache.pool import KVLayout, KVPool, LayerLayout
from genlm_backend.cache.prefix import Match, NullPrefixCache, PrefixCache
from genlm_backend.cache.radix import RadixPrefixCache
from genlm_backend.cache.rows import RowCache

__all__ = [
    "KVLayout",
    "KVPool",
    "LayerLayout",
    "Match",
    "NullPrefixCache",
    "PrefixCache",
    "RadixPrefixCache",
    "RowCache",
]
