"""Keys, values and rows that have been computed already; no event loop, no model."""

from genlm_backend.cache.codecs import KV_CACHE_DTYPES, KVCacheDtype
from genlm_backend.cache.mover import Mover
from genlm_backend.cache.nodes import NOWHERE, Nodes, Place
from genlm_backend.cache.rows import RowCache
from genlm_backend.cache.slots import PADDING_SLOT, Slots
from genlm_backend.cache.states import CacheLayer, StateLayout, StateStore, StateTensor
from genlm_backend.cache.store import KVLayout, KVStore, LayerLayout
from genlm_backend.cache.tier import TierName, check_tier
from genlm_backend.cache.tree import PrefixTree

__all__ = [
    "KV_CACHE_DTYPES",
    "NOWHERE",
    "PADDING_SLOT",
    "CacheLayer",
    "KVCacheDtype",
    "KVLayout",
    "KVStore",
    "LayerLayout",
    "Mover",
    "Nodes",
    "Place",
    "PrefixTree",
    "RowCache",
    "Slots",
    "StateLayout",
    "StateStore",
    "StateTensor",
    "TierName",
    "check_tier",
]
