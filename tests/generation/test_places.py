"""Which texts fit, against counting every prefix; nobody overtakes."""

from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.generation.engine.roster import (
    HEADROOM,
    Entry,
    Phase,
    make_plan,
    num_distinct_tokens,
)
from tests.generation.drafts import Draft, adapters, all_prefixes, need

contexts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(st.lists(contexts, max_size=6))
def test_distinct_tokens_are_the_distinct_prefixes(found):
    assert num_distinct_tokens(found) == len(all_prefixes(found))


@given(
    st.lists(st.tuples(st.lists(contexts, min_size=1, max_size=3), adapters), max_size=6),
    st.data(),
    st.integers(1, 8),
    st.integers(1, 70),
)
def test_a_plan_fits_and_is_the_longest_that_does(found, data, max_batch, capacity):
    texts = [Entry("request", Draft(c, lora_name, len(c))) for c, lora_name in found]
    for text in texts:
        text.phase = data.draw(st.sampled_from([Phase.WAITING, Phase.RUNNING, Phase.PREEMPTED]))

    def needed(chosen):
        return need([text.draft for text in chosen])

    plan = make_plan(texts, max_batch, capacity)
    assert needed(plan.running) <= plan.num_tokens <= max(capacity, 0)
    assert sum(text.draft.width for text in plan.running) <= max_batch
    assert all(needed([text]) > capacity for text in plan.hopeless)
    for place, text in enumerate(plan.running):
        if place and text.phase is not Phase.RUNNING:
            room = capacity - needed(plan.running[: place + 1])
            assert room >= HEADROOM * text.draft.width
    decided = len(plan.running) + len(plan.hopeless)
    assert set(texts[:decided]) == {*plan.running, *plan.hopeless}  # nobody overtakes
    if decided < len(texts):
        text = texts[decided]
        is_running = text.phase is Phase.RUNNING
        headroom = 0 if is_running or not plan.running else HEADROOM * text.draft.width
        too_wide = sum(t.draft.width for t in plan.running) + text.draft.width > max_batch
        assert too_wide or needed([*plan.running, text]) + headroom > capacity


def test_without_a_bound_only_the_batch_counts():
    texts = [Entry("request", Draft([[1] * 1000])) for _ in range(5)]
    assert make_plan(texts, 3, None).running == texts[:3]


def test_the_oldest_runs_alone_rather_than_nobody():
    old, young = (Entry("request", Draft([[i] * 30])) for i in (1, 2))
    plan = make_plan([old, young], 4, 40)
    assert (plan.running, plan.hopeless) == ([old], [])
