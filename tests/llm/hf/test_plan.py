"""The plan covers every token that is missing, once where it pays, and in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.prefix.slot_allocator import SlotAllocator
from genlm_backend.queries.context import of_no_model
from genlm_backend.scheduling.prefill_plan import (
    CostModel,
    ScheduledQuery,
    Size,
    StatePlan,
    plan_chunks,
    plan_groups,
    plan_uncached,
    plan_waves,
)

FREE_PASSES = CostModel(per_forward=0.0)  # sharing always pays


def test_cost_of_pass_is_sum_of_overhead_tokens_and_attention():
    cost = CostModel(per_forward=8, per_past_token=1 / 4)
    assert cost.of(0, 5, 7) == 8
    assert cost.of(3, 5, 7) == 8 + 3 * 5 + 3 * (5 + 7) / 4


contexts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


def tree_of(cached):
    tree = PrefixTree(SlotAllocator(10_000))
    for context in cached:
        node = tree.match(context)
        rest = np.array(context[tree.nodes.depth[node] :], np.int32)
        tree.insert(tree.append(node, rest, tree.allocate(len(rest))))
    return tree


def job_of(tree, context, num_before, targets=()):
    node = tree.match(context[:num_before])
    return ScheduledQuery(of_no_model(context), node, int(tree.nodes.depth[node]), targets)


def jobs_of(contexts, cached=()):
    """Jobs for rows of contexts over a tree that holds ``cached``."""
    tree = tree_of(cached)
    return [job_of(tree, context, len(context) - 1) for context in contexts]


def mixed_jobs(wanted, cached=()):
    """Jobs for rows, where no output is asked for, and for scores of so many tokens."""
    tree, jobs = tree_of(cached), []
    for context, num_outputs in wanted:
        targets = (9,) * min(num_outputs, len(context))
        jobs.append(job_of(tree, context, len(context) - (len(targets) or 1), targets))
    return jobs


wanted = st.lists(st.tuples(contexts, st.integers(0, 9)), min_size=1, max_size=12)


def check_answered(chunks, jobs):
    """Every job has each of its outputs once, behind its own tokens."""
    answered = {job: [] for job in jobs}
    for chunk in chunks:
        for position, own in chunk.outputs.items():
            assert chunk.start <= position < chunk.stop
            for job in own:
                ids = job.context[: position + 1]
                assert chunk.job.context[: position + 1] == ids
                answered[job].append(position)
    for job, positions in answered.items():
        num_outputs = len(job.targets) or 1
        end = len(job.context)
        assert sorted(positions) == list(range(end - num_outputs, end))


@given(
    wanted,
    st.lists(contexts, max_size=4),
    st.sampled_from([0.0, 3.0, 8.0, 1000.0]),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_chunks_answer_every_job_and_follow_their_parents(
    wanted, cached, per_forward, size, max_outputs
):
    cost = CostModel(per_forward=per_forward, max_chunk=size, max_outputs=max_outputs)
    jobs = mixed_jobs(wanted, cached)
    chunks = plan_chunks(jobs, cost)
    for chunk in chunks:
        token_ids = chunk.job.context
        assert 0 < chunk.num_tokens <= size
        assert len(chunk.outputs) <= max_outputs
        assert list(chunk.outputs) == sorted(chunk.outputs)
        # Walking up the parents leads to the cached prefix without a gap, in earlier waves.
        position, child = chunk.start, chunk
        while child.parent is not None:
            parent = child.parent
            assert parent.wave < child.wave
            assert parent.start < position <= parent.stop
            assert parent.job.context[:position] == token_ids[:position]
            position, child = parent.start, parent
        assert position == chunk.job.start
    check_answered(chunks, jobs)
    assert [s for wave in plan_waves(chunks) for s in wave if s.wave == 0]


long_contexts = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(tuple)


@given(
    st.lists(st.tuples(long_contexts, st.integers(0, 20)), min_size=1, max_size=8),
    st.lists(long_contexts, max_size=4),
    st.builds(StatePlan, st.booleans(), st.booleans()),
    st.integers(1, 12) | st.just(100),
    st.integers(1, 5),
    st.sampled_from([0.0, 5.0, 30.0]),
)
def test_chunks_of_recurrent_models_continue_at_end_of_parent(
    wanted, cached, states, size, max_outputs, per_forward
):
    """A state is at the end of what was before alone."""
    tree, jobs = tree_of(cached), []
    for context, num_outputs in wanted:
        targets = (9,) * min(num_outputs, len(context))
        most = len(context) - (len(targets) or 1)
        job = job_of(tree, context, most // 2, targets)
        job.num_known = most
        jobs.append(job)
    cost = CostModel(per_forward=per_forward, max_chunk=size, max_outputs=max_outputs)
    chunks = plan_chunks(jobs, cost, states)
    check_answered(chunks, jobs)
    for chunk in chunks:
        assert chunk.parent is None or chunk.parent.stop == chunk.start
        assert 0 < chunk.num_tokens <= size
        ones = chunk.by_token()
        assert [one.start for one in ones] == [*range(chunk.start, chunk.stop)]
        assert [at for one in ones for at in one.outputs] == sorted(chunk.outputs)


@given(wanted, st.integers(1, 5))
def test_uncached_chunks_start_at_first_token_and_end_with_output(wanted, size):
    jobs = [ScheduledQuery(job.context, targets=job.targets) for job in mixed_jobs(wanted)]
    chunks = plan_uncached([(job, part) for job in jobs for part in job.parts(size)])
    for chunk in chunks:
        assert (chunk.start, chunk.parent, chunk.wave) == (0, None, 0)
        assert list(chunk.outputs) == sorted(chunk.outputs)
        assert max(chunk.outputs) == chunk.stop - 1
        assert 0 < len(chunk.outputs) <= size
    texts = [tuple(chunk.token_ids) for chunk in chunks]
    assert len(set(texts)) == len(texts)
    check_answered(chunks, jobs)


def test_position_wanted_by_several_jobs_is_one_output():
    prompt = tuple(range(20))
    jobs = mixed_jobs([(prompt, 1)] * 5 + [(prompt, 0), ((*prompt, 5), 2), (prompt[:10], 3)])
    chunks = plan_chunks(jobs, CostModel())
    assert sum(chunk.num_tokens for chunk in chunks) == 21
    assert sum(len(chunk.outputs) for chunk in chunks) == 5
    (found,) = [s.outputs[19] for s in chunks if 19 in s.outputs]
    assert set(found) == set(jobs[:7])


@given(st.lists(contexts, min_size=1, max_size=40, unique=True), st.booleans())
def test_number_of_waves_is_logarithmic_in_contexts(contexts, is_mirrored):
    """Who waits for another branch is in one of at most half as many contexts."""
    if is_mirrored:  # so that neither the first nor the last branch is the right one by chance
        contexts = [tuple(1 - token for token in context) for context in contexts]
    waves = plan_waves(plan_chunks(jobs_of(contexts), FREE_PASSES))
    assert 2 ** (len(waves) - 1) <= len(contexts)


@given(st.lists(contexts, min_size=1, max_size=12, unique=True), st.lists(contexts, max_size=4))
def test_free_passes_compute_each_missing_token_once(contexts, cached):
    jobs = jobs_of(contexts, cached)
    chunks = plan_chunks(jobs, FREE_PASSES)
    missing = {job.context[:n] for job in jobs for n in range(job.start + 1, len(job.context) + 1)}
    assert sum(chunk.num_tokens for chunk in chunks) == len(missing)


def test_only_long_shared_prompt_is_computed_in_pass_of_its_own():
    long = jobs_of([(*range(100), 200 + i) for i in range(5)])
    chunks = plan_chunks(long, CostModel())
    assert sum(chunk.num_tokens for chunk in chunks) == 105
    assert len(plan_waves(chunks)) == 2
    short = jobs_of([(7, 200 + i) for i in range(5)])
    chunks = plan_chunks(short, CostModel())
    assert len(plan_waves(chunks)) == 1


@given(
    st.lists(contexts, min_size=1, max_size=12, unique=True),
    st.lists(contexts, max_size=4),
    st.integers(1, 5),
)
def test_nodes_before_chunk_hold_preceding_tokens_in_order(contexts, cached, size):
    """The nodes before a chunk are those of its context's tokens, in order."""
    tree = tree_of(cached)
    jobs = [job_of(tree, context, len(context) - 1) for context in contexts]
    chunks = plan_chunks(jobs, CostModel(per_forward=0.0, max_chunk=size))
    for chunk in chunks:
        ids, slots = chunk.token_ids, tree.allocate(chunk.num_tokens)
        chunk.nodes = tree.append(chunk.before, np.array(ids, np.int32), slots)
    nodes = tree.nodes
    for chunk in chunks:
        ids = chunk.job.context
        assert nodes.token[nodes.path(chunk.before)].tolist() == list(ids[: chunk.start])
        assert nodes.depth[chunk.nodes].tolist() == list(range(chunk.start + 1, chunk.stop + 1))
        token_chunk = chunk.token_chunk(nodes.slot[chunk.nodes])
        assert tuple(token_chunk.token_ids) == tuple(ids[chunk.start : chunk.stop])
        assert [chunk.start + n for n in token_chunk.outputs] == list(chunk.outputs)


def test_deep_nesting_does_not_recurse():
    jobs = jobs_of([tuple(range(n)) for n in range(1, 3000)])
    chunks = plan_chunks(jobs, CostModel())
    assert sum(chunk.num_tokens for chunk in chunks) == 2999


@given(
    st.lists(
        st.builds(Size, st.integers(1, 300), st.integers(0, 500), st.integers(0, 60)),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 400),
    st.integers(60, 200),
    st.booleans(),
    st.booleans(),
)
def test_groups_partition_rows_within_bounds(sizes, max_tokens, max_outputs, pads, equal):
    cost = CostModel(max_tokens=max_tokens, max_outputs=max_outputs)
    groups = plan_groups(sizes, cost, pads=pads, needs_equal_lengths=equal)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    for group in groups:
        width = max(sizes[i].num_new for i in group)
        assert len(group) == 1 or len(group) * width <= max_tokens
        assert sum(sizes[i].num_outputs for i in group) <= max_outputs
        assert pads or {sizes[i].num_new for i in group} == {width}
        assert not equal or len({sizes[i].prefix_len for i in group}) == 1


def test_rows_with_single_outputs_are_not_split_by_max_outputs():
    sizes = [Size(1, 60)] * 700
    assert list(map(len, plan_groups(sizes, CostModel(max_outputs=512)))) == [700]
    sizes = [Size(1, 60)] * 700 + [Size(20, 60, 20)] * 30
    groups = plan_groups(sizes, CostModel(max_outputs=512))
    assert len(groups) <= 4
    assert max(sum(sizes[i].num_outputs for i in group) for group in groups) <= 700


def total(sizes, groups, cost):
    return sum(
        cost.of(len(g), max(sizes[i].num_new for i in g), max(sizes[i].prefix_len for i in g))
        for g in groups
    )


@given(
    st.lists(
        st.builds(Size, st.integers(1, 300), st.integers(0, 500), st.just(1)),
        min_size=1,
        max_size=25,
    )
)
def test_groups_cost_no_more_than_one_common_pass(sizes):
    cost = CostModel(max_tokens=10**9)
    groups = plan_groups(sizes, cost)
    together = [list(range(len(sizes)))]
    assert total(sizes, groups, cost) <= total(sizes, together, cost) + 1e-6


def test_decode_steps_are_grouped_apart_from_prefill():
    sizes = [Size(1, 60)] * 19 + [Size(512, 0)]
    assert sorted(map(len, plan_groups(sizes, CostModel()))) == [1, 19]


def test_steps_of_similar_length_share_one_group():
    sizes = [Size(1, 50 + i) for i in range(20)]
    assert len(plan_groups(sizes, CostModel())) == 1


# ---------------------------------------------------------------- recurrent states


SEVERAL, BY_ONE = StatePlan(takes_several_tokens=True), StatePlan(takes_several_tokens=False)


@pytest.mark.parametrize(
    ("states", "num_before", "num_known", "is_cut"),
    [
        (SEVERAL, 0, 31, False),
        (SEVERAL, 0, 32, True),
        (SEVERAL, 5, 36, False),
        (SEVERAL, 5, 37, True),
        (SEVERAL, 0, 98, True),
        (SEVERAL._replace(is_short=True), 0, 60, False),
        (BY_ONE, 0, 87, False),  # 13 passes, which cost 8 tokens each, are more than 100 tokens
        (BY_ONE, 0, 88, True),
        (BY_ONE, 1, 33, True),
        (BY_ONE, 1, 32, False),
    ],
)
def test_context_is_cut_at_end_of_known_part_if_it_pays(states, num_before, num_known, is_cut):
    context = tuple(range(100))
    job = job_of(tree_of([context[:num_before]]), context, num_before)
    job.num_known = num_known
    chunks = plan_chunks([job], CostModel(per_forward=8), states)
    check_answered(chunks, [job])
    assert (num_known in [chunk.stop for chunk in chunks]) == is_cut
    assert [chunk.wave for chunk in chunks] == [*range(len(chunks))]
