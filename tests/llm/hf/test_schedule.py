"""The plan covers every token that is missing, once where it pays, and in order."""

from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.llm.hf.schedule import (
    CostModel,
    Job,
    plan_groups,
    plan_segments,
    plan_waves,
)

FREE_PASSES = CostModel(per_forward=0.0)  # sharing always pays
contexts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


def jobs_of(contexts, cached):
    """Jobs for distinct contexts, given what a cache that holds ``cached`` would match."""
    prefixes = {c[:n] for c in cached for n in range(len(c) + 1)} | {()}
    return [Job(c, max(n for n in range(len(c)) if c[:n] in prefixes)) for c in contexts]


@given(
    st.lists(contexts, min_size=1, max_size=12, unique=True),
    st.lists(contexts, max_size=4),
    st.sampled_from([0.0, 3.0, 8.0, 1000.0]),
    st.integers(1, 5),
)
def test_segments_answer_every_job_from_what_comes_before(contexts, cached, per_forward, size):
    cost = CostModel(per_forward=per_forward, max_segment=size)
    jobs = jobs_of(contexts, cached)
    segments = plan_segments(jobs, cost)
    answered = []
    for segment in segments:
        token_ids = jobs[segment.job].token_ids
        assert 0 < segment.num_tokens <= size
        # Walking up the parents leads to the cached prefix without a gap, in earlier waves.
        position, child = segment.start, segment
        while child.parent is not None:
            parent = child.parent
            assert parent.wave < child.wave
            assert parent.start < position <= parent.stop
            assert jobs[parent.job].token_ids[:position] == token_ids[:position]
            position, child = parent.start, parent
        assert position == jobs[segment.job].num_cached
        for position, job in segment.outputs:
            assert segment.start <= position < segment.stop
            assert position == len(jobs[job].token_ids) - 1
            assert jobs[job].token_ids[: position + 1] == token_ids[: position + 1]
            answered.append(job)
    assert sorted(answered) == list(range(len(jobs)))
    assert [s for wave in plan_waves(segments) for s in wave if s.wave == 0]


@given(st.lists(contexts, min_size=1, max_size=40, unique=True), st.booleans())
def test_the_most_wanted_branch_goes_on_and_few_passes_follow(contexts, is_mirrored):
    """Who waits for another branch is in one of at most half as many contexts."""
    if is_mirrored:  # so that neither the first nor the last branch is the right one by chance
        contexts = [tuple(1 - token for token in context) for context in contexts]
    waves = plan_waves(plan_segments([Job(context) for context in contexts], FREE_PASSES))
    assert 2 ** (len(waves) - 1) <= len(contexts)


@given(st.lists(contexts, min_size=1, max_size=12, unique=True), st.lists(contexts, max_size=4))
def test_where_passes_are_free_every_missing_token_is_computed_once(contexts, cached):
    jobs = jobs_of(contexts, cached)
    segments = plan_segments(jobs, FREE_PASSES)
    missing = {
        job.token_ids[:n] for job in jobs for n in range(job.num_cached + 1, len(job.token_ids) + 1)
    }
    assert sum(segment.num_tokens for segment in segments) == len(missing)


def test_a_long_shared_prompt_is_computed_once_and_a_short_one_is_not_waited_for():
    long = [Job((*range(100), 200 + i)) for i in range(5)]
    segments = plan_segments(long, CostModel())
    assert sum(segment.num_tokens for segment in segments) == 105
    assert len(plan_waves(segments)) == 2
    short = [Job((7, 200 + i)) for i in range(5)]
    segments = plan_segments(short, CostModel())
    assert len(plan_waves(segments)) == 1


def test_namespaces_share_nothing():
    jobs = [Job(tuple(range(50)), 0, name) for name in (None, "a", "b")]
    segments = plan_segments(jobs, FREE_PASSES)
    assert sum(segment.num_tokens for segment in segments) == 150


def test_deep_nesting_does_not_recurse():
    jobs = [Job(tuple(range(n))) for n in range(1, 3000)]
    segments = plan_segments(jobs, CostModel())
    assert sum(segment.num_tokens for segment in segments) == 2999


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=40),
    st.integers(1, 400),
)
def test_groups_part_the_rows_within_bounds(sizes, max_tokens):
    cost = CostModel(max_tokens=max_tokens)
    groups = plan_groups(sizes, cost)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    for group in groups:
        width = max(sizes[i][0] for i in group)
        assert len(group) == 1 or len(group) * width <= max_tokens


def total(sizes, groups, cost):
    return sum(
        cost.of(len(g), max(sizes[i][0] for i in g), max(sizes[i][1] for i in g)) for g in groups
    )


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=25))
def test_groups_cost_no_more_than_one_pass_or_one_pass_each(sizes):
    cost = CostModel(max_tokens=10**9)
    groups = plan_groups(sizes, cost)
    together = [list(range(len(sizes)))]
    assert total(sizes, groups, cost) <= total(sizes, together, cost) + 1e-6


def test_steps_do_not_pay_for_a_prefills_padding():
    sizes = [(1, 60)] * 19 + [(512, 0)]
    assert sorted(map(len, plan_groups(sizes, CostModel()))) == [1, 19]


def test_steps_of_about_one_length_go_together():
    sizes = [(1, 50 + i) for i in range(20)]
    assert len(plan_groups(sizes, CostModel())) == 1
