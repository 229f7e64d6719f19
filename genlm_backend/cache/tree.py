"""PrefixTree: which prefixes of a context have their keys and values in slots already."""

from __future__ import annotations

import itertools
import weakref
from array import array
from collections.abc import Hashable, Sequence
from typing import Protocol, final

from genlm_backend.cache.edges import Edges
from genlm_backend.cache.integrity import check_nodes, check_slots
from genlm_backend.cache.node import Match, Node, Place, Spot
from genlm_backend.cache.slots import Slots
from genlm_backend.cache.tier import Tier, TierName
from genlm_backend.common_prefix import common_length
from genlm_backend.errors import CacheError


class Moves(Protocol):
    """What moves keys and values between the device and the host."""

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        """Copy slots of the device to as many distinct ones of the host."""

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        """Copy slots of the host to as many distinct ones of the device."""


@final
class PrefixTree:
    """A radix tree over token ids whose nodes own slots; locks, LRU leaves, a fixed budget.

    The tree is that of SGLang's RadixAttention (Zheng et al., 2024, arXiv:2312.07104). One
    thread at a time may call it. The README beside this file tells the protocol.

    Args:
        slots: Where the slots come from; nobody else may use it.
        host_slots: Slots on the host, where what is evicted from the others is kept; ``None`` for
            none.
        moves: What moves keys and values to these and back.

    Attributes:
        slots: As given.
        host_slots: As given; without any where there is no host tier.
        num_evicted: Number of tokens that were dropped to make room so far.
        num_to_host: Number of tokens moved to the host so far.
        num_to_device: Number of tokens moved back so far.
    """

    def __init__(
        self, slots: Slots, host_slots: Slots | None = None, moves: Moves | None = None
    ) -> None:
        self.slots = slots
        self.host_slots = Slots(0) if host_slots is None else host_slots
        self.num_evicted = self.num_to_host = self.num_to_device = 0
        self._device, self._host = Tier("device", slots), Tier("host", self.host_slots)
        self._moves = moves
        self._live: set[Match] = set()
        self._pins: list[Match] = []
        self._edges = Edges(self._device)

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
        root = self._edges.root(namespace)
        return Spot(root, 0, 0) if place is None else place.spot(root, most)

    def match_from(self, spot: Spot, tokens: array[int]) -> Match:
        """Lock and return the longest cached prefix of a context.

        Args:
            spot: Where its first tokens are, as ``recall`` has just returned it.
            tokens: The tokens after them, as 32-bit integers.
        """
        node, done = self._edges.walk(spot.node, tokens, spot.num_left)
        return self._lock(node, spot.num_tokens + done)

    def num_on_host(self, match: Match) -> int:
        """Return how many tokens of a match are on the host."""
        return sum(len(node.tokens) for node in self._host_path(match))

    def allocate(self, count: int, matches: Sequence[Match] = ()) -> list[int] | None:
        """Take ``count`` slots, evicting what is old and unlocked; ``None`` if there is no room.

        Args:
            count: Number of slots.
            matches: Locked matches, what of which is on the host is moved to the device; nothing
                is if there is no room.
        """
        # From the root on, so that nothing of the device is ever below the host.
        paths = [reversed(self._host_path(match)) for match in matches]
        below = list(dict.fromkeys(itertools.chain.from_iterable(paths)))
        num_below = sum(len(node.tokens) for node in below)
        missing = count + num_below - (self.slots.num_slots - self.slots.num_used)
        if missing > 0:
            # Evicting in vain would cost others their prefixes for nothing.
            if missing > self._num_unlocked_slots(missing):
                return None
            self.evict(missing)
        if below:
            self._fetch(below, array("q", self.slots.allocate(num_below)))
        return self.slots.allocate(count)

    def insert(self, match: Match, token_ids: Sequence[int], slots: Sequence[int]) -> Match:
        """Put ``token_ids`` and their filled ``slots`` below ``match``; return the longer match.

        The given match is spent. Slots for tokens that the tree has by now are free again; where
        it has them on the host, the given ones take their place.

        Raises:
            CacheError: If the match has been unlocked or is on the host, or there is not one slot
                for each token.
        """
        if len(token_ids) != len(slots):
            raise CacheError(f"{len(token_ids)} tokens for {len(slots)} slots")
        if match not in self._live:
            raise CacheError("this match has been unlocked")
        if match.node.tier is not self._device:
            raise CacheError("this match is on the host")
        if not slots:
            return match
        tokens, new = array("i", token_ids), array("q", slots)
        end, known = self._edges.walk(match.node, tokens)
        num_tokens = match.num_tokens + len(tokens)
        if not known:
            return self._grow(match, tokens, new, num_tokens)
        self._adopt(end, match.node, new[:known])
        if known < len(tokens):
            end = self._edges.grow(end, tokens[known:], new[known:])
        longer = self._lock(end, num_tokens)
        self.unlock(match)
        return longer

    def unlock(self, match: Match) -> None:
        """Unlock ``match``; again has no effect."""
        if match not in self._live:
            return
        self._live.remove(match)
        self._edges.touch(match.node, -1)
        self._edges.offer(match.node)
        if match.node.tier is self._host:
            top = self._host_path(match)[-1].parent
            assert top is not None
            self._edges.offer(top)  # which has no leaf below it but on the host

    def free(self, slots: Sequence[int]) -> None:
        """Return slots that were allocated and not inserted."""
        self.slots.free(slots)

    def pin(self, match: Match) -> None:
        """Keep ``match`` locked until ``clear()``; the match is spent."""
        self._pins.append(match)

    def evict(self, count: int) -> int:
        """Free up to ``count`` unlocked slots, least recently used first; return how many.

        Their tokens go to the host, as far as there is room for them or for something older.
        """
        freed, moved = 0, dict[int, int]()  # slots of the host, and those they are filled from
        while freed < count and (node := self._device.pop()) is not None:
            num_freed = min(len(node.slots), count - freed)
            freed += num_freed
            if not self.host_slots.num_slots:
                self.num_evicted += num_freed
                self._edges.shorten(node, num_freed)
            else:
                self._demote(node, num_freed, moved)
        if moved:
            assert self._moves is not None
            try:
                self._moves.to_host([*moved.values()], [*moved])
            except BaseException:  # then nobody knows what is there
                for node in list(self._edges):
                    if node.tier is self._host and not moved.keys().isdisjoint(node.slots):
                        self.num_evicted += self._edges.drop(node)
                raise
            self.num_to_host += len(moved)
        return freed

    def num_cached(
        self, token_ids: Sequence[int], namespace: Hashable = None, tier: TierName | None = None
    ) -> int:
        """Return how many of the first tokens are cached; locks nothing and changes no age.

        Args:
            token_ids: The tokens.
            namespace: Their namespace.
            tier: What is counted: the tokens on the device, on the host, or both.
        """
        tokens, done, num_in_tier = array("i", token_ids), 0, 0
        node = self._edges.find(namespace)
        while node is not None and done < len(tokens):
            node = node.children.get(tokens[done])
            if node is not None:
                shared = common_length(node.tokens, tokens[done : done + len(node.tokens)])
                done += shared
                num_in_tier += shared if node.tier.name == tier else 0
                node = node if shared == len(node.tokens) else None
        return done if tier is None else num_in_tier

    def forget(self, token_ids: Sequence[int], namespace: Hashable = None, keep: int = 0) -> int:
        """Free the unlocked slots of a context beyond its first ``keep`` tokens; return how many.

        What another cached context shares with it stays.
        """
        if self._edges.find(namespace) is None:
            return 0
        match = self.match(token_ids, namespace)
        self.unlock(match)
        node, end = match.node, match.num_tokens
        while end > keep and node.parent is not None and not (node.children or node.num_locks):
            parent = node.parent
            num_freed = min(len(node.slots), end - keep)
            end -= num_freed
            self._edges.shorten(node, num_freed)
            node = parent
        return match.num_tokens - end

    def clear(self) -> None:
        """Unpin and free everything.

        Raises:
            CacheError: If a match is locked that is not pinned.
        """
        if len(self._live) > len(self._pins):
            raise CacheError("cleared while a match is locked")
        self._edges.clear()
        self._live.clear()
        self._pins.clear()
        self._device.clear()
        self._host.clear()

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
        nodes = list(self._edges)
        check_slots(self._device, nodes, held)
        check_slots(self._host, nodes)
        check_nodes(nodes, self._live)
        if sum(node.parent is not None for node in nodes) != self._edges.num_nodes:
            raise CacheError(f"the tree does not have {self._edges.num_nodes} nodes")

    # ---------------------------------------------------------------- tiers

    def _host_path(self, match: Match) -> list[Node]:
        """Return the nodes of a match that are on the host, the last of them first."""
        path = match.node.path()
        return list(itertools.takewhile(lambda node: node.tier is self._host, path))

    def _fetch(self, nodes: Sequence[Node], slots: array[int]) -> None:
        """Move nodes of the host into slots of the device."""
        assert self._moves is not None
        try:
            self._moves.to_device([slot for node in nodes for slot in node.slots], slots)
        except BaseException:
            self.slots.free(slots)
            raise
        self.num_to_device += len(slots)
        done = 0
        for node in nodes:
            self.host_slots.free(node.slots)
            node.move_to(self._device, slots[done : done + len(node.slots)])
            done += len(node.slots)

    def _adopt(self, end: Node, top: Node, slots: array[int]) -> None:
        """Give filled slots to those nodes from ``top`` to ``end`` that are on the host."""
        path = list(itertools.takewhile(lambda node: node is not top, end.path()))
        done = 0
        for node in reversed(path):
            part = slots[done : done + len(node.slots)]
            done += len(part)
            if node.tier is self._host:
                self.host_slots.free(node.slots)
                node.move_to(self._device, part)
            else:
                self.slots.free(part)

    def _demote(self, node: Node, count: int, moved: dict[int, int]) -> None:
        """Move the last ``count`` tokens of a leaf of the device to the host.

        What does not fit there is dropped, with all that is below it.

        Args:
            node: The leaf.
            count: Number of its tokens.
            moved: Where the slots are noted, those of the host first.
        """
        if count < len(node.tokens):
            self._edges.split(node, len(node.tokens) - count)
        missing = count - self.host_slots.num_free
        while missing > 0 and (leaf := self._host.pop()) is not None:
            num_freed = min(len(leaf.slots), missing)
            missing -= num_freed
            self.num_evicted += num_freed
            self._edges.shorten(leaf, num_freed)
        lower: Node | None = node
        if missing > 0:
            lower = self._edges.split(node, count - missing) if missing < count else None
            self.num_evicted += self._edges.drop(node)
        if lower is None:
            return
        slots = self.host_slots.allocate(len(lower.tokens))
        moved.update(zip(slots, lower.slots, strict=True))
        self.slots.free(lower.slots)
        lower.move_to(self._host, array("q", slots))
        assert lower.parent is not None
        self._edges.offer(lower)
        self._edges.offer(lower.parent)

    # ---------------------------------------------------------------- locks

    def _lock(self, node: Node, num_tokens: int) -> Match:
        """Return a match that ends with ``node``, whose path has been used now."""
        match = Match(node, num_tokens)
        self._live.add(match)
        self._edges.touch(node, 1)
        return match

    def _grow(self, match: Match, tokens: array[int], slots: array[int], num_tokens: int) -> Match:
        """Put tokens below a match that none of them follows yet; return one with its locks."""
        node = match.node
        if not node.children and node.num_locks == 1 and node.parent is not None:
            # The only user of a leaf makes it longer, so that a particle that has gone a thousand
            # tokens alone is one node and not a chain of a thousand.
            node.tokens.extend(tokens)
            node.slots.extend(slots)
        else:
            node = self._edges.grow(node, tokens, slots)
            node.num_locks, node.last_used = 1, match.node.last_used
        longer = Match(node, num_tokens)
        self._live.remove(match)
        self._live.add(longer)
        return longer

    def _num_unlocked_slots(self, enough: int) -> int:
        """Return how many slots ``evict`` could free, counted up to ``enough``."""
        total = 0
        for node in self._edges:
            if not node.num_locks and node.tier is self._device:
                total += len(node.slots)
                if total >= enough:
                    break
        return total
