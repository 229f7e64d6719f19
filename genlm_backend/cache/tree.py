"""PrefixTree: which prefixes of a context have their keys and values in slots already."""

from __future__ import annotations

import heapq
import itertools
import weakref
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import final

from genlm_backend.cache.node import Match, Node, Place, Spot
from genlm_backend.cache.slots import Slots
from genlm_backend.common_prefix import common_length
from genlm_backend.errors import CacheError


@final
class PrefixTree:
    """A radix tree over token ids whose nodes own slots; locks, LRU leaves, a fixed budget.

    The tree is that of SGLang's RadixAttention (Zheng et al., 2024, arXiv:2312.07104). One
    thread at a time may call it. The README beside this file tells the protocol.

    Args:
        slots: Where the slots come from; nobody else may use it.

    Attributes:
        slots: As given.
        num_evicted: Number of slots evicted to make room so far.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.num_evicted = 0
        self._roots: dict[Hashable, Node] = {}
        self._live: set[Match] = set()
        self._pins: list[Match] = []
        self._clock = itertools.count(1)
        self._ties = itertools.count()
        # Leaves nobody locks, oldest first. An entry that its node has outlived (used since,
        # grown children, gone) stays until it is popped or until the dead outnumber the living.
        self._evictable: list[tuple[int, int, Node]] = []
        self._num_nodes = 0

    # ---------------------------------------------------------------- the protocol

    def match(self, token_ids: Sequence[int], namespace: Hashable = None) -> Match:
        """Lock and return the longest cached prefix of ``token_ids``.

        ``namespace`` separates contexts whose keys and values differ for equal tokens, such as
        those of different adapters. The cost grows with the tokens of the prefix.
        """
        return self.match_from(self.recall(None, namespace), array("i", token_ids))

    def place(self, match: Match) -> Place:
        """Return where a match ends, so that it can be found again without being walked to."""
        return Place(weakref.ref(match.node), match.num_tokens)

    def recall(self, place: Place | None, namespace: Hashable = None, most: int = 0) -> Spot:
        """Return where the first tokens of a context are: up to ``most``, and maybe none.

        The cost grows with the nodes above the place, and not with their tokens.

        Args:
            place: Where the context was found, or another one that begins with the same tokens;
                ``None`` where that is not known.
            namespace: Namespace of the context; a place in another one counts for nothing.
            most: Number of the context's tokens that are asked for.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, array("i"), array("q"))
        node = None if place is None else place.node()
        if place is None or node is None:
            return Spot(root, 0, 0)
        stop, top = 0, node
        while top.parent is not None:
            stop += len(top.tokens)
            top = top.parent
        if top is not root:  # evicted, or of another tree or namespace
            return Spot(root, 0, 0)
        num_tokens = min(place.num_tokens, most)
        while node.parent is not None:
            start = stop - len(node.tokens)
            if start < num_tokens:
                return Spot(node, num_tokens, stop - num_tokens)
            node, stop = node.parent, start
        return Spot(root, 0, 0)

    def match_from(self, spot: Spot, tokens: array[int]) -> Match:
        """Lock and return the longest cached prefix of a context.

        Args:
            spot: Where its first tokens are, as ``recall`` has just returned it.
            tokens: The tokens after them, as 32-bit integers.
        """
        node, done = self._walk(spot.node, tokens, spot.num_left)
        return self._lock(node, spot.num_tokens + done)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` slots, evicting what is old and unlocked; ``None`` if there is no room."""
        missing = count - (self.slots.num_slots - self.slots.num_used)
        if missing > 0:
            # Evicting in vain would cost others their prefixes for nothing.
            if missing > self._num_unlocked_slots(missing):
                return None
            self.evict(missing)
        return self.slots.allocate(count)

    def insert(self, match: Match, token_ids: Sequence[int], slots: Sequence[int]) -> Match:
        """Put ``token_ids`` and their filled ``slots`` below ``match``; return the longer match.

        The given match is spent. Slots for tokens that the tree has by now are free again.

        Raises:
            CacheError: If the match has been unlocked, or there is not one slot for each token.
        """
        if len(token_ids) != len(slots):
            raise CacheError(f"{len(token_ids)} tokens for {len(slots)} slots")
        if match not in self._live:
            raise CacheError("this match has been unlocked")
        if not slots:
            return match
        tokens, new = array("i", token_ids), array("q", slots)
        end, known = self._walk(match.node, tokens)
        self.slots.free(new[:known])
        if known < len(tokens):
            end = self._grow(end, match, tokens[known:], new[known:])
        longer = self._lock(end, match.num_tokens + len(tokens))
        self.unlock(match)
        return longer

    def unlock(self, match: Match) -> None:
        """Unlock ``match``; again has no effect."""
        if match not in self._live:
            return
        self._live.remove(match)
        self._touch(match.node, -1)
        self._offer(match.node)

    def free(self, slots: Sequence[int]) -> None:
        """Return slots that were allocated and not inserted."""
        self.slots.free(slots)

    def pin(self, match: Match) -> None:
        """Keep ``match`` locked until ``clear()``; the match is spent."""
        self._pins.append(match)

    def evict(self, count: int) -> int:
        """Free up to ``count`` unlocked slots, least recently used first; return how many."""
        freed = 0
        while freed < count and self._evictable:
            stamp, _, node = heapq.heappop(self._evictable)
            if stamp != node.last_used or not self._is_evictable(node):
                continue
            num_freed = min(len(node.slots), count - freed)
            freed += num_freed
            self._shorten(node, num_freed)
        self.num_evicted += freed
        return freed

    def num_cached(self, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Return how many of the first tokens are cached; locks nothing and changes no age."""
        tokens, done = array("i", token_ids), 0
        node = self._roots.get(namespace)
        while node is not None and done < len(tokens):
            node = node.children.get(tokens[done])
            if node is not None:
                shared = common_length(node.tokens, tokens[done : done + len(node.tokens)])
                done += shared
                node = node if shared == len(node.tokens) else None
        return done

    def forget(self, token_ids: Sequence[int], namespace: Hashable = None, keep: int = 0) -> int:
        """Free the unlocked slots of a context beyond its first ``keep`` tokens; return how many.

        What another cached context shares with it stays.
        """
        if namespace not in self._roots:
            return 0
        match = self.match(token_ids, namespace)
        self.unlock(match)
        node, end = match.node, match.num_tokens
        while end > keep and self._is_evictable(node):
            parent = node.parent
            assert parent is not None
            num_freed = min(len(node.slots), end - keep)
            end -= num_freed
            self._shorten(node, num_freed)
            node = parent
        return match.num_tokens - end

    def clear(self) -> None:
        """Unpin and free everything.

        Raises:
            CacheError: If a match is locked that is not pinned.
        """
        if len(self._live) > len(self._pins):
            raise CacheError("cleared while a match is locked")
        for root in self._roots.values():
            for node in root.subtree():
                self.slots.free(node.slots)
        self._roots.clear()
        self._live.clear()
        self._pins.clear()
        self._evictable.clear()
        self._num_nodes = 0

    # ---------------------------------------------------------------- counting

    @property
    def num_slots(self) -> int:
        """Number of slots that there are."""
        return self.slots.num_slots

    @property
    def num_used(self) -> int:
        """Number of slots that hold tokens, or that have been allocated."""
        return self.slots.num_used

    def check_integrity(self, held: Sequence[int] = ()) -> None:
        """Count every slot and lock; ``held`` are slots allocated and not yet inserted.

        Raises:
            CacheError: If a slot has no owner or two, or a lock count is wrong.
        """
        nodes = [node for root in self._roots.values() for node in root.subtree()]
        owned = Counter(slot for node in nodes for slot in node.slots)
        owned.update(held)
        owned.update(self.slots.recycled())
        if wrong := [slot for slot, count in owned.items() if count != 1]:
            raise CacheError(f"slots with more than one owner: {wrong[:10]}")
        num_used = sum(len(node.slots) for node in nodes) + len(held)
        if num_used != self.slots.num_used:
            raise CacheError(f"{num_used} slots are used, and not {self.slots.num_used}")
        num_touched = self.slots.num_touched
        if len(owned) != num_touched or (owned and not 1 <= min(owned) <= num_touched):
            raise CacheError(f"{len(owned)} slots have an owner, {num_touched} are in use")
        locks = Counter(node for match in self._live for node in match.node.path())
        for node in nodes:
            if node.num_locks != locks[node]:
                raise CacheError(f"{locks[node]} matches lock a node that says {node.num_locks}")
            if len(node.slots) != len(node.tokens):
                raise CacheError("a node has as many slots as tokens, or it is wrong")
            for first, child in node.children.items():
                if child.parent is not node or child.tokens[0] != first:
                    raise CacheError("a child does not know its parent or its first token")
        if sum(node.parent is not None for node in nodes) != self._num_nodes:
            raise CacheError(f"the tree does not have {self._num_nodes} nodes")
        offered = {node for stamp, _, node in self._evictable if stamp == node.last_used}
        if any(self._is_evictable(node) and node not in offered for node in nodes):
            raise CacheError("an unlocked leaf can never be evicted")

    # ---------------------------------------------------------------- nodes

    def _walk(self, node: Node, tokens: array[int], num_left: int = 0) -> tuple[Node, int]:
        """Follow ``tokens``, splitting the last edge; return where that ends and how far it is.

        Args:
            node: Where to begin.
            tokens: What to follow.
            num_left: How many tokens before the end of ``node`` to begin.
        """
        done = 0
        while True:
            if num_left:
                size = len(node.tokens)
                edge = node.tokens if num_left == size else node.tokens[size - num_left :]
                if edge != tokens[done : done + num_left]:
                    shared = common_length(edge, tokens[done:])
                    return self._split(node, size - num_left + shared), done + shared
                done += num_left
            child = node.children.get(tokens[done]) if done < len(tokens) else None
            if child is None:
                return node, done
            node, num_left = child, len(child.tokens)

    def _split(self, node: Node, size: int) -> Node:
        """Give the first ``size`` tokens of ``node`` to a new parent of it; return that."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.tokens[:size], node.slots[:size])
        upper.num_locks, upper.last_used = node.num_locks, node.last_used
        parent.children[upper.tokens[0]] = upper
        del node.tokens[:size], node.slots[:size]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self._num_nodes += 1
        return upper

    def _grow(self, end: Node, match: Match, tokens: array[int], slots: array[int]) -> Node:
        if end is match.node and not end.children and end.num_locks == 1 and end.parent is not None:
            # The only user of a leaf makes it longer, so that a particle that has gone a thousand
            # tokens alone is one node and not a chain of a thousand.
            end.tokens.extend(tokens)
            end.slots.extend(slots)
            return end
        child = end.children[tokens[0]] = Node(end, tokens, slots)
        self._num_nodes += 1
        return child

    def _shorten(self, leaf: Node, count: int) -> None:
        """Free the last ``count`` slots of an unlocked leaf, and the leaf with the last of them."""
        start, parent = len(leaf.slots) - count, leaf.parent
        self.slots.free(leaf.slots[start:])
        if not start:
            self._remove_leaf(leaf)
            return
        assert parent is not None
        shorter = Node(parent, leaf.tokens, leaf.slots)
        del shorter.tokens[start:], shorter.slots[start:]
        shorter.last_used = leaf.last_used
        parent.children[shorter.tokens[0]] = shorter
        leaf.parent = None  # whoever remembers it looks elsewhere
        self._offer(shorter)

    def _remove_leaf(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        node.parent = None
        self._num_nodes -= 1
        self._offer(parent)

    # ---------------------------------------------------------------- locks and age

    def _lock(self, node: Node, num_tokens: int) -> Match:
        """Return a match that ends with ``node``, whose path has been used now."""
        match = Match(node, num_tokens)
        self._live.add(match)
        self._touch(node, 1)
        return match

    def _touch(self, node: Node, num_locks: int) -> None:
        """Add locks to a node and all above it, which have been used now."""
        stamp, part = next(self._clock), node
        while part is not None:
            part.num_locks += num_locks
            part.last_used = stamp
            part = part.parent

    def _is_evictable(self, node: Node) -> bool:
        return node.parent is not None and not (node.children or node.num_locks)

    def _offer(self, node: Node) -> None:
        if self._is_evictable(node):
            heapq.heappush(self._evictable, (node.last_used, next(self._ties), node))
            if len(self._evictable) > 64 + 4 * self._num_nodes:
                self._evictable = [
                    (leaf.last_used, next(self._ties), leaf)
                    for root in self._roots.values()
                    for leaf in root.subtree()
                    if self._is_evictable(leaf)
                ]
                heapq.heapify(self._evictable)

    def _num_unlocked_slots(self, enough: int) -> int:
        """Return how many slots ``evict`` could free, counted up to ``enough``."""
        total = 0
        for root in self._roots.values():
            for node in root.subtree():
                if not node.num_locks:
                    total += len(node.slots)
                    if total >= enough:
                        return total
        return total
