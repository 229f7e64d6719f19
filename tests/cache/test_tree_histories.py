"""The tree against a plain dictionary that remembers what each slot holds."""

from array import array
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from genlm_backend.cache import Match, PrefixTree, Slots
from genlm_backend.errors import CacheError
from tests.cache.test_tree import slots_of

contexts = st.lists(st.integers(0, 2), min_size=1, max_size=10)


class Copies:
    """Moves what slots have been filled with."""

    def __init__(self):
        self.device, self.host = {}, {}
        self.is_broken = False

    def to_host(self, device_slots, host_slots):
        self.copy(self.device, device_slots, self.host, host_slots)

    def to_device(self, host_slots, device_slots):
        self.copy(self.host, host_slots, self.device, device_slots)

    def copy(self, source, from_slots, target, to_slots):
        assert len(from_slots) == len(to_slots) == len(set(to_slots))
        found = [source.get(slot) for slot in from_slots]
        if self.is_broken:  # halfway
            found = [None] * len(found)
        target.update(zip(to_slots, found, strict=True))
        if self.is_broken:
            raise RuntimeError("broken")


class Tree(RuleBasedStateMachine):
    """Knows which context's last token each slot was filled with."""

    num_slots, num_host_slots = 24, 0
    matches = Bundle("matches")
    places = Bundle("places")

    def __init__(self):
        super().__init__()
        self.copies = Copies()
        self.written = self.copies.device
        self.cache = PrefixTree(Slots(self.num_slots), Slots(self.num_host_slots), self.copies)
        self.live: set[Match] = set()
        self.seen: list[tuple[list[int], str | None]] = []
        self.pinned: list[tuple[str | None, list[int]]] = []

    def check_match(self, match, token_ids, namespace):
        found = []
        for node in reversed(list(match.node.path())):
            filled = getattr(self.copies, node.tier.name)
            found += [filled[slot] for slot in node.slots]
        wanted = [(namespace, tuple(token_ids[: i + 1])) for i in range(match.num_tokens)]
        assert found == wanted
        num_on_host = self.cache.num_on_host(match)
        cached = self.cache.num_cached(token_ids, namespace, "host")
        assert cached >= num_on_host  # what has been added since is nobody's of this match
        if not num_on_host:
            assert [self.written[slot] for slot in slots_of(match)] == wanted

    @property
    def num_used(self):
        return self.cache.num_used + self.cache.host_slots.num_used

    @rule(target=matches, token_ids=contexts, namespace=st.sampled_from([None, "adapter"]))
    def look_up(self, token_ids, namespace):
        num_cached = self.cache.num_cached(token_ids, namespace)
        tiers = [self.cache.num_cached(token_ids, namespace, tier) for tier in ("device", "host")]
        match = self.cache.match(token_ids, namespace)
        self.live.add(match)
        assert match.num_tokens == num_cached == sum(tiers)
        assert self.cache.num_on_host(match) == tiers[1]
        self.check_match(match, token_ids, namespace)
        return match, token_ids, namespace

    @rule(target=matches, held=consumes(matches))
    def extend(self, held):
        match, token_ids, namespace = held
        rest = token_ids[match.num_tokens :]
        slots = self.cache.allocate(len(rest), [match])
        if slots is None:
            return held
        self.cache.check_integrity(slots)
        self.check_match(match, token_ids, namespace)
        assert self.cache.num_on_host(match) == 0
        for index, slot in enumerate(slots):
            self.written[slot] = (namespace, tuple(token_ids[: match.num_tokens + index + 1]))
        longer = self.cache.insert(match, rest, slots)
        self.live = self.live - {match} | {longer}
        self.check_match(longer, token_ids, namespace)
        return longer, token_ids, namespace

    @rule(token_ids=contexts, namespace=st.sampled_from([None, None, "adapter"]))
    def fill(self, token_ids, namespace):
        """All at once, so that there is much that nobody locks."""
        held = self.extend(self.look_up(token_ids, namespace))
        self.cache.unlock(held[0])
        self.live.discard(held[0])
        self.seen.append((token_ids, namespace))

    @precondition(lambda self: self.seen)
    @rule(target=matches, index=st.integers(0), more=st.lists(st.integers(0, 2), max_size=2))
    def look_up_again(self, index, more):
        token_ids, namespace = self.seen[index % len(self.seen)]
        return self.look_up([*token_ids, *more], namespace)

    @rule(target=places, held=matches)
    def remember(self, held):
        match, token_ids, namespace = held
        return self.cache.place(match), token_ids[: match.num_tokens], namespace

    @rule(
        target=matches,
        held=places,
        num_kept=st.integers(0, 10),
        more=st.lists(st.integers(0, 2), max_size=6),
    )
    def look_up_from(self, held, num_kept, more):
        """What begins as a remembered context does is found as from the beginning."""
        place, token_ids, namespace = held
        wanted = [*token_ids[:num_kept], *more]
        most = num_kept if num_kept < len(token_ids) else len(wanted)
        num_cached = self.cache.num_cached(wanted, namespace)
        spot = self.cache.recall(place, namespace, most)
        assert spot.num_tokens <= most
        match = self.cache.match_from(spot, array("i", wanted[spot.num_tokens :]))
        self.live.add(match)
        assert match.num_tokens == num_cached
        self.check_match(match, wanted, namespace)
        return match, wanted, namespace

    @rule(held=places)
    def look_up_elsewhere(self, held):
        """A place counts for nothing in another namespace."""
        place, _, namespace = held
        other = "adapter" if namespace is None else None
        assert self.cache.recall(place, other, 10).num_tokens == 0

    @rule(held=consumes(matches))
    def give_back(self, held):
        self.cache.unlock(held[0])
        self.cache.unlock(held[0])
        self.live.discard(held[0])

    @rule(held=consumes(matches))
    def give_up(self, held):
        match, token_ids, _ = held
        slots = self.cache.allocate(len(token_ids) - match.num_tokens)
        if slots is not None:
            self.cache.free(slots)
        self.cache.unlock(match)
        self.live.discard(match)

    @precondition(lambda self: len(self.pinned) < 2)
    @rule(held=consumes(matches))
    def pin(self, held):
        match, token_ids, namespace = held
        self.cache.pin(match)
        self.live.discard(match)
        self.pinned.append((namespace, token_ids[: match.num_tokens]))

    @rule(count=st.integers(0, 4) | st.integers(0, 30))
    def evict(self, count):
        used, both = self.cache.num_used, self.num_used
        moved, evicted = self.cache.num_to_host, self.cache.num_evicted
        freed = self.cache.evict(count)
        assert freed <= count
        assert self.cache.num_used == used - freed
        assert self.cache.num_evicted - evicted == both - self.num_used
        assert self.cache.num_to_host - moved <= freed

    @rule(count=st.integers(1, 30))
    def evict_in_vain(self, count):
        """What has been moved nobody knows where is not found."""
        used, moved = self.cache.num_used, self.cache.num_to_host
        self.copies.is_broken = True
        both, evicted = self.num_used, self.cache.num_evicted
        try:
            freed = self.cache.evict(count)
        except RuntimeError:
            freed = used - self.cache.num_used
            assert freed > 0
        finally:
            self.copies.is_broken = False
        assert self.cache.num_to_host == moved
        assert self.cache.num_used == used - freed
        assert self.cache.num_evicted - evicted == both - self.num_used

    @rule(held=matches)
    def fetch_in_vain(self, held):
        match, token_ids, namespace = held
        on_host = self.cache.num_on_host(match)
        self.copies.is_broken = True
        try:
            self.cache.allocate(0, [match])
        except RuntimeError:
            pass
        finally:
            self.copies.is_broken = False
        assert self.cache.num_on_host(match) == on_host
        self.check_match(match, token_ids, namespace)

    @rule(token_ids=contexts, other=contexts, keep=st.integers(0, 5))
    def forget(self, token_ids, other, keep):
        used, cached = self.num_used, self.cache.num_cached(token_ids)
        of_other = self.cache.num_cached(other)
        freed = self.cache.forget(token_ids, keep=keep)
        assert self.num_used == used - freed
        assert self.cache.num_cached(token_ids) == cached - freed >= min(cached, keep)
        pairs = zip(token_ids, other, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if shared is not None and of_other > shared:  # it goes another way, which stays
            assert self.cache.num_cached(other) == of_other

    @rule()
    def clear(self):
        if self.live:
            with pytest.raises(CacheError, match="locked"):
                self.cache.clear()
        else:
            self.cache.clear()
            self.pinned.clear()
            assert self.num_used == 0

    @invariant()
    def adds_up(self):
        self.cache.check_integrity()

    @invariant()
    def pins_hold(self):
        for namespace, token_ids in self.pinned:
            match = self.cache.match(token_ids, namespace)
            assert match.num_tokens == len(token_ids)
            self.cache.unlock(match)


Tree.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestTree = Tree.TestCase


class TieredTree(Tree):
    num_slots, num_host_slots = 12, 10


class TreeAboveMuch(Tree):
    num_slots, num_host_slots = 10, 60


class TreeAboveLittle(Tree):
    num_slots, num_host_slots = 16, 3


for _machine in (TieredTree, TreeAboveMuch, TreeAboveLittle):
    _machine.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestTieredTree = TieredTree.TestCase
TestTreeAboveMuch = TreeAboveMuch.TestCase
TestTreeAboveLittle = TreeAboveLittle.TestCase


@pytest.mark.parametrize("sizes", [(12, 10), (10, 60), (16, 3), (30, 30)])
def test_what_is_evicted_is_found_on_the_host(sizes):
    """Long histories in which much is evicted, some of it wanted again, and little is locked."""
    random, num_on_host = Random(0), 0
    for _ in range(15):
        tree = Tree()
        tree.cache = PrefixTree(*map(Slots, sizes), tree.copies)
        held: list = []
        for _ in range(150):
            begin = random.choice(tree.seen)[0] if tree.seen and random.random() < 0.8 else []
            kept = begin[: random.randint(0, len(begin))] if random.random() < 0.4 else begin
            context = [*kept, *random.choices(range(3), k=random.randint(1, 4))][:10]
            used = random.random()
            if used < 0.7:
                tree.fill(context, None)
            elif used < 0.85:  # computed beside what is on the host, which it takes the place of
                num_host = random.randint(0, len(context))
                match = tree.cache.match(context[:num_host])
                slots = tree.cache.allocate(len(context) - match.num_tokens, [match])
                if slots is not None:
                    done = match.num_tokens
                    for i, slot in enumerate(slots):
                        tree.written[slot] = (None, tuple(context[: done + i + 1]))
                    match = tree.cache.insert(match, context[done:], slots)
                tree.check_match(match, context, None)
                tree.cache.unlock(match)
                tree.live.clear()
            elif len(held) < 2:
                held.append(tree.look_up(context, None))
            tree.cache.check_integrity()
            num_on_host += sum(tree.cache.num_on_host(match) > 0 for match, *_ in held)
            if held and random.random() < 0.4:
                tree.extend(held[0]) if random.random() < 0.2 else None
                tree.cache.unlock(held.pop(0)[0])
            tree.cache.check_integrity()
    assert num_on_host > 20
