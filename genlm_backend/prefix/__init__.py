"""Keys, values and running states that have been computed already; no event loop, no model."""

from genlm_backend.prefix.codecs import KV_CACHE_DTYPES, KVCacheDtype
from genlm_backend.prefix.kv_store import KVLayout, KVStore, LayerLayout
from genlm_backend.prefix.nodes import NOWHERE, Nodes, Place
from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.prefix.slot_mover import Mover
from genlm_backend.prefix.slots import PADDING_SLOT, Slots
from genlm_backend.prefix.states import CacheLayer, StateLayout, States, StateStore, StateTensor
from genlm_backend.prefix.tiers import TierName, check_tier

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
    "Slots",
    "StateLayout",
    "StateStore",
    "StateTensor",
    "States",
    "TierName",
    "check_tier",
]
