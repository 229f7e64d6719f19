"""RadixPrefixCache: a token tree over the slots of a KVPool."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from genlm_backend.cache.pool import KVPool
from genlm_backend.cache.prefix import Match, PrefixCache
from genlm_backend.errors import CacheError
from genlm_backend.process_lock import ProcessLock


class _Node:
    """An edge of the tree and the subtree at its end.

    ``num_locks`` counts the live matches that end here or below, so that a node with none has
    none below it either.
    """

    __slots__ = ("children", "is_stale", "last_used", "num_locks", "parent", "slots", "tokens")

    def __init__(self, parent: _Node | None, tokens: array[int], slots: array[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, _Node] = {}
        self.num_locks = 0
        self.last_used = 0
        self.is_stale = False

    def path(self) -> Iterator[_Node]:
        """This node, its parent, and so on up to the root."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[_Node]:
        """This node and everything below it."""
        stack: list[_Node] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class RadixPrefixCache(PrefixCache):
    """A radix tree over token ids whose nodes own slots; locks, LRU leaves, a fixed budget.

    The tree is that of SGLang's RadixAttention (Zheng et al., 2024, arXiv:2312.07104). All
    methods may be called from any thread.

    Args:
        pool: Where the slots come from; nobody else may use it.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.num_evicted = 0
        self._lock = ProcessLock(is_reentrant=True)
        self._roots: dict[Hashable, _Node] = {}
        self._live: set[Match] = set()
        self._pins: list[Match] = []
        self._stale: set[_Node] = set()
        self._clock = itertools.count(1)
        self._ties = itertools.count()
        # Leaves nobody locks, oldest first. An entry that its node has outlived (used since,
        # grown children, gone) stays until it is popped or until the dead outnumber the living.
        self._evictable: list[tuple[int, int, _Node]] = []
        self._num_nodes = 0

    # ---------------------------------------------------------------- the protocol

    def match(self, token_ids: Sequence[int], namespace: Hashable = None) -> Match:
        """Lock and return the longest cached prefix of ``token_ids``."""
        tokens = array("q", token_ids)
        with self._lock.here:
            root = self._roots.get(namespace)
            if root is None:
                root = self._roots[namespace] = _Node(None, array("q"), array("q"))
            node, matched = self._walk(root, tokens)
            slots = array("q")
            for part in reversed([*node.path()]):
                slots.extend(part.slots)
            assert len(slots) == matched
            return self._locked(Match(slots, node))

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` slots, evicting what is old and unlocked; ``None`` if there is no room."""
        with self._lock.here:
            missing = count - self.pool.num_free
            if missing > 0:
                # Evicting in vain would cost others their prefixes for nothing.
                if missing > self._num_unlocked_slots(missing):
                    return None
                self.evict(missing)
            return self.pool.allocate(count)

    def insert(self, match: Match, token_ids: Sequence[int], slots: Sequence[int]) -> Match:
        """Put ``token_ids`` and their filled ``slots`` below ``match``; return the longer match."""
        if len(token_ids) != len(slots):
            raise CacheError(f"{len(token_ids)} tokens for {len(slots)} slots")
        with self._lock.here:
            if match not in self._live:
                raise CacheError("this match has been released")
            node = match.node
            if node.is_stale:
                self.pool.free(slots)
                return match
            if not slots:
                return match
            tokens, new = array("q", token_ids), array("q", slots)
            end, known = self._walk(node, tokens)
            kept = array("q", match.slots)
            for part in reversed([*itertools.takewhile(lambda part: part is not node, end.path())]):
                kept.extend(part.slots)
            self.pool.free(new[:known])
            if known < len(tokens):
                kept.extend(new[known:])
                end = self._grow(end, match, tokens[known:], new[known:])
            longer = self._locked(Match(kept, end))
            self._unlock(match)
            return longer

    def release(self, match: Match) -> None:
        """Unlock ``match``; releasing it again has no effect."""
        with self._lock.here:
            if match in self._live:
                self._unlock(match)

    def free(self, slots: Sequence[int]) -> None:
        """Return slots that were allocated and not inserted."""
        with self._lock.here:
            self.pool.free(slots)

    def pin(self, match: Match) -> None:
        """Keep ``match`` locked until ``clear()``; the match is spent."""
        with self._lock.here:
            if match.node.is_stale:
                self.release(match)
            else:
                self._pins.append(match)

    def evict(self, count: int) -> int:
        """Free up to ``count`` unlocked slots, least recently used first; return how many."""
        freed = 0
        with self._lock.here:
            while freed < count and self._evictable:
                stamp, _, node = heapq.heappop(self._evictable)
                if stamp != node.last_used or not self._is_evictable(node):
                    continue
                num_kept = max(0, len(node.slots) - (count - freed))
                freed += len(node.slots) - num_kept
                self.pool.free(node.slots[num_kept:])
                if num_kept:
                    del node.slots[num_kept:], node.tokens[num_kept:]
                    self._offer(node)
                else:
                    self._remove_leaf(node)
            self.num_evicted += freed
        return freed

    def peek(self, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Return how many of the first tokens are cached; locks nothing and changes no age."""
        tokens, done = array("q", token_ids), 0
        with self._lock.here:
            node = self._roots.get(namespace)
            while node is not None and done < len(tokens):
                node = node.children.get(tokens[done])
                if node is not None:
                    shared = _common_prefix(node.tokens, tokens[done : done + len(node.tokens)])
                    done += shared
                    node = node if shared == len(node.tokens) else None
        return done

    def forget(self, token_ids: Sequence[int], namespace: Hashable = None, keep: int = 0) -> int:
        """Free a context's unlocked slots beyond its first ``keep`` tokens; return how many."""
        freed = 0
        with self._lock.here:
            match = self.match(token_ids, namespace)
            self.release(match)
            node, end = match.node, match.num_tokens
            while end > keep and self._is_evictable(node):
                count = min(len(node.slots), end - keep)
                self.pool.free(node.slots[len(node.slots) - count :])
                freed, end = freed + count, end - count
                if count < len(node.slots):
                    del node.slots[-count:], node.tokens[-count:]
                    break
                parent = node.parent
                self._remove_leaf(node)
                node = parent
        return freed

    def clear(self) -> None:
        """Unpin everything and free all that no evaluation under way has locked."""
        with self._lock.here:
            for match in self._pins:
                self._unlock(match)
            self._pins.clear()
            for node in [node for root in self._roots.values() for node in root.subtree()]:
                if node.num_locks:
                    node.is_stale = True
                    node.children = {t: c for t, c in node.children.items() if c.num_locks}
                    self._stale.add(node)
                else:
                    self.pool.free(node.slots)
                    node.parent = None
            self._roots.clear()
            self._evictable.clear()
            self._num_nodes = 0

    # ---------------------------------------------------------------- counting

    @property
    def num_slots(self) -> int:
        """Slots there are."""
        return self.pool.num_slots

    @property
    def num_used(self) -> int:
        """Slots that hold tokens, or that an evaluation has allocated."""
        with self._lock.here:
            return self.pool.num_used

    @property
    def num_pinned(self) -> int:
        """Matches pinned since the last ``clear()``."""
        return len(self._pins)

    def check_integrity(self, held: Sequence[int] = ()) -> None:
        """Count every slot and lock; ``held`` are slots allocated and not yet inserted."""
        with self._lock.here:
            in_tree = [node for root in self._roots.values() for node in root.subtree()]
            nodes = {*in_tree, *self._stale}
            owned = Counter(slot for node in nodes for slot in node.slots)
            owned.update(held)
            owned.update(self.pool.recycled_slots())
            if wrong := [slot for slot, count in owned.items() if count != 1]:
                raise CacheError(f"slots with more than one owner: {wrong[:10]}")
            num_touched = self.pool.num_touched
            if len(owned) != num_touched or (owned and not 1 <= min(owned) <= num_touched):
                raise CacheError(f"{len(owned)} slots have an owner, {num_touched} are in use")
            locks = Counter(node for match in self._live for node in match.node.path())
            for node in nodes:
                if node.num_locks != locks[node]:
                    raise CacheError(
                        f"{locks[node]} matches lock a node that says {node.num_locks}"
                    )
                if len(node.slots) != len(node.tokens):
                    raise CacheError("a node has as many slots as tokens, or it is wrong")
                for first, child in node.children.items():
                    if child.parent is not node or child.tokens[0] != first:
                        raise CacheError("a child does not know its parent or its first token")
            if sum(node.parent is not None for node in in_tree) != self._num_nodes:
                raise CacheError(f"the tree does not have {self._num_nodes} nodes")
            offered = {node for stamp, _, node in self._evictable if stamp == node.last_used}
            if any(self._is_evictable(node) and node not in offered for node in in_tree):
                raise CacheError("an unlocked leaf can never be evicted")

    # ---------------------------------------------------------------- the tree

    def _walk(self, node: _Node, tokens: array[int]) -> tuple[_Node, int]:
        """Follow ``tokens`` from ``node``, splitting the last edge; return where and how far."""
        done = 0
        while done < len(tokens):
            child = node.children.get(tokens[done])
            if child is None:
                break
            size = len(child.tokens)
            if child.tokens == tokens[done : done + size]:
                node, done = child, done + size
                continue
            shared = _common_prefix(child.tokens, tokens[done:])
            return self._split(child, shared), done + shared
        return node, done

    def _split(self, node: _Node, size: int) -> _Node:
        """Give the first ``size`` tokens of ``node`` to a new parent of it; return that."""
        parent = node.parent
        assert parent is not None
        upper = _Node(parent, node.tokens[:size], node.slots[:size])
        upper.num_locks, upper.last_used = node.num_locks, node.last_used
        parent.children[upper.tokens[0]] = upper
        del node.tokens[:size], node.slots[:size]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self._num_nodes += 1
        return upper

    def _grow(self, end: _Node, match: Match, tokens: array[int], slots: array[int]) -> _Node:
        if end is match.node and not end.children and end.num_locks == 1 and end.parent is not None:
            # The only user of a leaf makes it longer, so that a particle that has gone a thousand
            # tokens alone is one node and not a chain of a thousand.
            end.tokens.extend(tokens)
            end.slots.extend(slots)
            return end
        child = end.children[tokens[0]] = _Node(end, tokens, slots)
        self._num_nodes += 1
        return child

    def _remove_leaf(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        node.parent = None
        self._num_nodes -= 1
        self._offer(parent)

    # ---------------------------------------------------------------- locks and age

    def _locked(self, match: Match) -> Match:
        stamp = next(self._clock)
        for node in match.node.path():
            node.num_locks += 1
            node.last_used = stamp
        self._live.add(match)
        return match

    def _unlock(self, match: Match) -> None:
        self._live.remove(match)
        match.is_released = True
        stamp = next(self._clock)
        for node in match.node.path():
            node.num_locks -= 1
            node.last_used = stamp
            if node.is_stale and not node.num_locks:
                self.pool.free(node.slots)
                self._stale.remove(node)
        if not match.node.is_stale:
            self._offer(match.node)

    def _is_evictable(self, node: _Node) -> bool:
        return node.parent is not None and not (node.children or node.num_locks or node.is_stale)

    def _offer(self, node: _Node) -> None:
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
        """Slots that ``evict`` could free, counted up to ``enough``."""
        total = 0
        for root in self._roots.values():
            for node in root.subtree():
                if not node.num_locks:
                    total += len(node.slots)
                    if total >= enough:
                        return total
        return total


def _common_prefix(first: array[int], second: array[int]) -> int:
    """How many leading elements two arrays share, by bisection over slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
