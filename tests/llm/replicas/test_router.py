"""Which replica a context goes to."""

from array import array

from benchmarks.routing import WAYS, simulate
from genlm_backend.remote.replicas.router import Router


def packed(token_ids):
    return array("i", token_ids).tobytes()


def send(router, context, space=None):
    return router.choose(space, packed(context))


def test_context_continues_on_the_replica_of_its_prefix():
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


def test_group_sharing_a_prompt_splits_if_queues_cost_more_than_prefill():
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


def test_simulated_router_recomputes_few_tokens_and_rarely_idles():
    found = {way: simulate(way, 16, 1500, 16, 256) for way in WAYS}
    repeated = {way: one.num_tokens / one.least_tokens for way, one in found.items()}
    idle = {way: one.idle_share for way, one in found.items()}
    assert repeated["the router"] < 1.3 < 3 < repeated["random"]
    assert idle["the router"] < 0.12 < 0.5 < idle["affinity"]


def test_lost_replica_gets_no_contexts_until_it_is_back():
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
