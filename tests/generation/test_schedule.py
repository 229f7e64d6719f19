"""Who works, against counting every prefix; nobody overtakes, and everybody is told in the end."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.generation.schedule import (
    HEADROOM,
    make_plan,
    num_distinct_tokens,
    num_shared,
)

contexts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@dataclass(eq=False)
class Item:
    contexts: list = field(default_factory=list)
    lora_name: str | None = None
    width: int = 1
    is_running: bool = False


def all_prefixes(contexts):
    return {tuple(context[: n + 1]) for context in contexts for n in range(len(context))}


@given(st.lists(contexts, max_size=6))
def test_distinct_tokens_are_the_distinct_prefixes(found):
    assert num_distinct_tokens(found) == len(all_prefixes(found))


@given(contexts, contexts)
def test_shared_tokens(first, second):
    shared = num_shared(first, second)
    assert first[:shared] == second[:shared]
    assert shared in (len(first), len(second)) or first[shared] != second[shared]


@given(
    st.lists(
        st.tuples(st.lists(contexts, min_size=1, max_size=3), st.sampled_from([None, "a"])),
        max_size=6,
    ),
    st.data(),
    st.integers(1, 8),
    st.integers(1, 70),
)
def test_a_plan_fits_and_is_the_longest_that_does(found, data, max_batch, capacity):
    items = [Item(c, lora_name, len(c)) for c, lora_name in found]
    for item in items:
        item.is_running = data.draw(st.booleans())

    def need(chosen):
        return sum(
            len(
                all_prefixes(
                    [c for item in chosen if item.lora_name == name for c in item.contexts]
                )
            )
            for name in (None, "a")
        )

    plan = make_plan(items, max_batch, capacity)
    assert need(plan.running) <= plan.num_tokens <= max(capacity, 0)
    assert sum(item.width for item in plan.running) <= max_batch
    assert all(need([item]) > capacity for item in plan.hopeless)
    for place, item in enumerate(plan.running):
        if place and not item.is_running:
            room = capacity - need(plan.running[: place + 1])
            assert room >= HEADROOM * item.width
    decided = len(plan.running) + len(plan.hopeless)
    assert set(items[:decided]) == {*plan.running, *plan.hopeless}  # nobody overtakes
    if decided < len(items):
        item = items[decided]
        headroom = 0 if item.is_running or not plan.running else HEADROOM * item.width
        too_wide = sum(i.width for i in plan.running) + item.width > max_batch
        assert too_wide or need([*plan.running, item]) + headroom > capacity


def test_without_a_bound_only_the_batch_counts():
    items = [Item([[1] * 1000]) for _ in range(5)]
    assert make_plan(items, 3, None).running == items[:3]


def test_the_oldest_runs_alone_rather_than_nobody():
    old, young = Item([[1] * 30]), Item([[2] * 30])
    plan = make_plan([old, young], 4, 40)
    assert (plan.running, plan.hopeless) == ([old], [])
