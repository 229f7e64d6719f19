"""What has to add up in a prefix tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from genlm_backend.cache.node import Match, Node
from genlm_backend.cache.tier import Tier
from genlm_backend.errors import CacheError


def check_slots(tier: Tier, nodes: Iterable[Node], held: Sequence[int] = ()) -> None:
    """Count the slots of one tier.

    Args:
        tier: The tier.
        nodes: All nodes of the tree.
        held: Slots of the tier that have been allocated and not inserted.

    Raises:
        CacheError: If a slot has no owner or two.
    """
    own = [node for node in nodes if node.tier is tier]
    owned = Counter(slot for node in own for slot in node.slots)
    owned.update(held)
    owned.update(tier.slots.recycled())
    if wrong := [slot for slot, count in owned.items() if count != 1]:
        raise CacheError(f"slots with more than one owner: {wrong[:10]}")
    num_used = sum(len(node.slots) for node in own) + len(held)
    if num_used != tier.slots.num_used:
        raise CacheError(f"{num_used} slots are used, and not {tier.slots.num_used}")
    num_touched = tier.slots.num_touched
    if len(owned) != num_touched or (owned and not 1 <= min(owned) <= num_touched):
        raise CacheError(f"{len(owned)} slots have an owner, {num_touched} are in use")
    offered = tier.offered()
    if any(tier.is_evictable(node) and node not in offered for node in own):
        raise CacheError("an unlocked leaf can never be evicted")


def check_nodes(nodes: Iterable[Node], live: Iterable[Match]) -> None:
    """Compare what nodes say of each other and of their locks.

    Args:
        nodes: All nodes of the tree.
        live: All matches that are locked.

    Raises:
        CacheError: If something is wrong.
    """
    locks = Counter(node for match in live for node in match.node.path())
    for node in nodes:
        if node.num_locks != locks[node]:
            raise CacheError(f"{locks[node]} matches lock a node that says {node.num_locks}")
        if len(node.slots) != len(node.tokens):
            raise CacheError("a node has as many slots as tokens, or it is wrong")
        for first, child in node.children.items():
            if child.parent is not node or child.tokens[0] != first:
                raise CacheError("a child does not know its parent or its first token")
            if child.tier is not node.tier and child.tier.name == "device":
                raise CacheError("a node of the device comes after one of the host")
        num_below = sum(child.tier is node.tier for child in node.children.values())
        if node.num_below != num_below:
            raise CacheError(f"{num_below} children share the tier of one of {node.num_below}")
