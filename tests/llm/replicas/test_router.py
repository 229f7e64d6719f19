"""Where contexts go: the tree of what was sent against brute force, and the decision."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.routing import WAYS, simulate
from genlm_backend.remote.replicas.router import Router
from genlm_backend.remote.replicas.sent_tree import SentTree

CONTEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def packed(token_ids):
    return array("i", token_ids).tobytes()


def common(first, second):
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_what_a_replica_was_sent_is_known(data):
    """Against every context that was sent and not forgotten since."""
    tree, sent = SentTree([None] * 3), {}
    for _ in range(data.draw(st.integers(1, 25))):
        context, space = data.draw(CONTEXTS), data.draw(st.sampled_from([None, "poet"]))
        expected = [
            max((common(context, other) for other in sent.get((space, r), [])), default=0)
            for r in range(3)
        ]
        assert [p.num_known for p in tree.matches(space, packed(context))] == expected
        replica = data.draw(st.integers(0, 2))
        if data.draw(st.integers(0, 9)) == 0:
            tree.forget(replica)
            sent = {key: value for key, value in sent.items() if key[1] != replica}
        else:
            tree.add(space, packed(context), replica)
            sent.setdefault((space, replica), []).append(context)
        for r in range(3):
            prefixes = {
                (space, tuple(c[:n])) for (space, own), contexts in sent.items() if own == r
                for c in contexts for n in range(1, len(c) + 1)
            }  # fmt: skip
            assert tree.num_tokens[r] == len(prefixes)


@given(st.lists(st.tuples(CONTEXTS, st.integers(0, 1)), max_size=40), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_what_is_known_is_bounded(history, capacity):
    tree, last = SentTree([capacity, None]), {}
    for context, replica in history:
        tree.add(None, packed(context), replica)
        last[replica] = context
        assert tree.num_tokens[0] <= max(capacity, 0)
    if 1 in last:
        assert tree.matches(None, packed(last[1]))[1].num_known == len(last[1])
    tree.clear()
    assert tree.num_tokens == [0, 0]


def test_what_has_not_been_answered_is_known_to_wait():
    tree = SentTree([None] * 2)
    tree.add(None, packed([1, 2, 3]), 0)
    tree.add(None, packed([1, 2, 4]), 0)
    assert tree.matches(None, packed([1, 2, 4, 5]))[0] == (3, 3, 1.0)
    tree.answered(None, packed([1, 2, 3]), 0)
    assert tree.matches(None, packed([1, 2, 4, 5])) == [(3, 1, 1.0), (0, 0, 3.0)]
    tree.answered(None, packed([1, 2, 4]), 0)
    assert tree.matches(None, packed([1, 2, 4, 5]))[0] == (3, 0, 1.0)
    tree.add(None, packed([1, 2]), 1)
    assert tree.matches(None, packed([1, 2, 4, 5]))[1] == (2, 2, 2.0)


def send(router, context, space=None):
    return router.choose(space, packed(context))


def test_a_context_goes_on_where_it_was():
    router = Router([None] * 3)
    first = send(router, [1, 2, 3])
    other = send(router, [7, 8, 9])
    assert (first.num_new, other.num_new) == (3, 3)
    assert first.replica != other.replica
    for choice in (first, other):
        router.ended(choice)
    for length in range(4, 30):
        found = send(router, [7, 8, 9, *range(3, length)])
        assert (found.replica, found.num_new) == (other.replica, 1)
        router.ended(found)
    assert send(router, [7, 8, 9, 3, 4, 5], "poet").num_new == 6


def test_a_group_behind_one_prompt_is_parted_where_the_queue_costs_more_than_the_prompt():
    router, prompt = Router([None] * 2, batch_size=1000, per_forward=8), list(range(50))
    router.ended(send(router, prompt))
    few = [send(router, [*prompt, i]) for i in range(5)]
    assert {choice.replica for choice in few} == {0}
    found = few + [send(router, [*prompt, i]) for i in range(5, 200)]
    assert sum(choice.num_new for choice in found) == 200 + 50  # the prompt was computed once more
    tokens = [load.num_tokens for load in router.loads]
    assert abs(tokens[0] - tokens[1]) <= 10
    for choice in found:
        router.ended(choice)
    found = [send(router, [*prompt, i, i]) for i in range(200)]
    tokens = [load.num_tokens for load in router.loads]
    assert abs(tokens[0] - tokens[1]) <= 40
    assert sum(tokens) == sum(choice.num_new for choice in found) < 220
    longer = Router([None] * 2)
    found = [send(longer, [*range(4000), i]) for i in range(20)]
    assert {choice.replica for choice in found} == {0}


def test_many_particles_on_many_replicas_compute_little_twice_and_wait_little():
    found = {way: simulate(way, 16, 1500, 16, 256) for way in WAYS}
    repeated = {way: one.num_tokens / one.least_tokens for way, one in found.items()}
    idle = {way: one.idle_share for way, one in found.items()}
    assert repeated["the router"] < 1.3 < 3 < repeated["random"]
    assert idle["the router"] < 0.12 < 0.5 < idle["affinity"]


def test_a_replica_that_is_lost_gets_nothing_until_it_is_back():
    router = Router([None] * 2)
    first = send(router, [1, 2, 3])
    router.lost(first.replica)
    router.ended(first)
    found = send(router, [1, 2, 3, 4])
    assert (found.replica, found.num_new) == (1 - first.replica, 4)
    router.ended(found)
    router.back(first.replica)
    router.lost(found.replica)
    assert send(router, [1, 2, 3, 4]).num_new == 4
    assert router.is_alive
    router.lost(first.replica)
    assert not router.is_alive
