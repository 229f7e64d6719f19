"""Rounds over a runner that has no model: what each slot holds, and what each row reads of it."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from genlm_backend.attention.cascade_plan import CascadePlan
from genlm_backend.backends.hf.cascade_attention import UncachedAttention
from genlm_backend.errors import QueryDroppedError
from genlm_backend.prefix.kv_pool import KVLayout, KVPool
from genlm_backend.prefix.prefix_tree import PrefixTree
from genlm_backend.prefix.slot_allocator import SlotAllocator
from genlm_backend.queries.context import of_no_model
from genlm_backend.queries.query import Adapter, RowQuery
from genlm_backend.readouts.score_query import ScoreQuery
from genlm_backend.scheduling.prefix_cache import PrefixCache
from genlm_backend.scheduling.scheduler import ALL, Capabilities
from tests.llm.hf.fake_runner import VOCAB, FakeRunner, logprobs_after, passes_over
from tests.llm.hf.paths_of import read_by_row
from tests.tree_integrity import check_integrity

BAD = VOCAB - 1
"""A token behind which everything is NaN."""


class Reads:
    """A way to attend that has a plan, and no tensors."""

    def __init__(self, few_tokens):
        self.few_tokens = few_tokens

    def plan(self, past, num_new):
        return CascadePlan.of(past, num_new, self.few_tokens)


class ReadingRunner(FakeRunner):
    """A runner that compares what is read with what is there.

    Attributes:
        num_steps: Number of passes that read as the one before did, and one token more.
        num_whole: Number of contexts that have been run whole.
        host: Adapter and context by slot of the host.
        plan: How the last step was read.
    """

    def __init__(self):
        super().__init__()
        self.num_steps = self.num_whole = 0
        self.host, self.plan = {}, None

    def forward(self, batch, attend):
        is_whole = isinstance(attend, UncachedAttention)
        if is_whole:
            self.num_whole += len(batch.num_new)
        elif (plan := batch.plan) is not None:
            self.num_steps += plan.suffix.shape[2] > plan.num_columns
            self.plan = plan
            columns = batch.past.columns(max(batch.prefix_lens, default=0))
            for row, read in enumerate(read_by_row(plan, batch.num_rows)):
                prefix_len = int(batch.prefix_lens[row])
                assert int(plan.prefix_lens[row]) == prefix_len
                own = columns[row, columns.shape[1] - prefix_len :].tolist()
                assert read == list(enumerate(own))
        return super().forward(batch, attend)

    def to_host(self, device_slots, host_slots):
        found = [self.written[slot] for slot in device_slots]
        self.host.update(zip(host_slots, found, strict=True))

    def to_device(self, host_slots, device_slots):
        found = [self.host[slot] for slot in host_slots]
        self.written.update(zip(device_slots, found, strict=True))


class Spoiling(ReadingRunner):
    """A runner whose rows are NaN behind a token of their own."""

    def forward(self, batch, attend):
        logits = super().forward(batch, attend)
        contexts = [self._context(batch, *at) for at in zip(*self._outputs(batch), strict=True)]
        has_nan = torch.tensor([BAD in context for context in contexts], dtype=torch.bool)
        logits[has_nan] = torch.nan
        return logits

    def _outputs(self, batch):
        return batch.output_rows.tolist(), batch.output_columns.tolist()

    def _context(self, batch, row, column):
        prefix_len = int(batch.prefix_lens[row])
        past = batch.past.columns(max(batch.prefix_lens))[row]
        past = past[len(past) - prefix_len :].tolist()
        return [self.written[slot][1][-1] for slot in past] + batch.input_ids[
            row, : column + 1
        ].tolist()


def passes_of(num_slots, num_host_slots=0, few_tokens=3, runner=None, can=ALL, **cost):
    """Passes over a runner that knows what slots hold, of two tiers or one."""
    runner, wanted = runner or Spoiling(), []

    def check_cancelled():
        if wanted and not wanted.pop():
            raise QueryDroppedError("by the test")

    pool = KVPool(KVLayout(), num_slots)
    cache = PrefixCache(runner, Reads(few_tokens), pool, num_slots)
    passes = passes_over(runner, check_cancelled, cache, can, **cost)
    runner.max_outputs, passes.wanted = passes.cost.max_outputs, wanted
    passes.cache.tree = PrefixTree(SlotAllocator(num_slots), SlotAllocator(num_host_slots), runner)
    passes.cache.pool.is_finite = lambda slots: (
        not any(BAD in runner.written[slot][1] for slot in slots.tolist())
    )
    return passes


def wanted_row(token_ids):
    """The row behind a context, which is NaN behind a bad token."""
    if BAD in token_ids:
        return torch.full((VOCAB,), torch.nan)
    return logprobs_after(token_ids)


def ask(passes, contexts, adapter=None, num_failing=0):
    """Ask contexts, and compare their rows; for some of them, memory may not suffice."""
    passes.runner.adapter = adapter
    rows = passes.evaluate([RowQuery(context, adapter) for context in contexts])
    assert sum(isinstance(row, MemoryError) for row in rows) <= num_failing
    for context, row in zip(contexts, rows, strict=True):
        if isinstance(row, MemoryError):
            continue
        expected = wanted_row(tuple(context))
        torch.testing.assert_close(row.logprobs, expected, rtol=0, atol=1e-6, equal_nan=True)
    check_integrity(passes.tree)
    return rows


def distinct(contexts):
    return list(dict.fromkeys(contexts))


picks = st.lists(st.tuples(st.integers(0, 40), st.integers(0, BAD)), min_size=1, max_size=8)
sound = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=8)


class Histories(RuleBasedStateMachine):
    """Contexts that live on, with their places, while anything happens to what is kept."""

    @initialize(
        num_slots=st.sampled_from([0, 1, 6, 12, 30, 400]),
        num_host_slots=st.sampled_from([0, 0, 5, 60]),
        few_tokens=st.sampled_from([0, 3, 10**6]),
        max_tokens=st.sampled_from([3, 1000]),
        max_chunk=st.sampled_from([1, 3, 1000]),
        max_outputs=st.sampled_from([1, 2, 1000]),
        per_forward=st.sampled_from([0.0, 3.0, 1000.0]),
        needs_equal_lengths=st.booleans(),
    )
    def make(self, num_slots, num_host_slots, few_tokens, needs_equal_lengths, **cost):
        can = Capabilities(needs_equal_lengths=needs_equal_lengths)
        self.scheduler = passes_of(num_slots, num_host_slots, few_tokens, can=can, **cost)
        self.particles = [of_no_model([i % 3, i % 2]) for i in range(6)]
        self.seen = list(self.particles)
        self.is_pinned = False

    def ask(self, contexts, adapter=None, num_failing=0):
        ask(self.scheduler, distinct(contexts), adapter, num_failing)

    @rule(chosen=sound)
    def step(self, chosen):
        """All go on, resampled."""
        count = len(self.particles)
        self.particles = [self.particles[i % count].extend(token) for i, token in chosen]
        self.seen += self.particles
        self.ask(self.particles)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=8, max_size=8), num_steps=st.integers(1, 4))
    def steps(self, tokens, num_steps):
        """All go on several times, each for itself."""
        for start in range(num_steps):
            own = tokens[start:] + tokens[:start]
            self.particles = [c.extend(t) for c, t in zip(self.particles, own, strict=False)]
            self.ask(self.particles)
        self.seen += self.particles

    @rule(chosen=picks)
    def others(self, chosen):
        """Contexts of any age go on, some by a token that spoils them."""
        self.ask([self.seen[i % len(self.seen)].extend(token) for i, token in chosen])

    @rule(chosen=picks)
    def again(self, chosen):
        """Contexts that have been asked, and what they extend, together."""
        asked = [self.seen[i % len(self.seen)] for i, _ in chosen]
        self.ask([*asked, *(context[:-1] for context in asked if len(context) > 1)])

    @rule(chosen=picks, more=st.lists(st.integers(0, 2), max_size=9))
    def beside(self, chosen, more):
        """A prompt beside steps."""
        asked = [self.seen[i % len(self.seen)].extend(token) for i, token in chosen]
        self.ask([*asked, of_no_model([2, *more])])

    @rule(chosen=picks, start=st.integers(1, 9))
    def score(self, chosen, start):
        """A text beside steps."""
        asked = [RowQuery(self.seen[i % len(self.seen)].extend(token)) for i, token in chosen]
        text = self.seen[chosen[0][0] % len(self.seen)].extend(1)
        scoring = ScoreQuery(RowQuery(text), 1 + start % (len(text) - 1))
        self.scheduler.runner.adapter = None
        *rows, scores = self.scheduler.evaluate([*distinct(asked), scoring])
        for query, row in zip(distinct(asked), rows, strict=True):
            expected = wanted_row(tuple(query.context))
            torch.testing.assert_close(row.logprobs, expected, rtol=0, atol=1e-6, equal_nan=True)
        ends = range(scoring.start, len(text))
        expected = torch.stack([wanted_row(tuple(text[:end]))[text[end]] for end in ends])
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)

    @rule(chosen=sound)
    def with_an_adapter(self, chosen):
        self.ask([self.seen[i % len(self.seen)] for i, _ in chosen], Adapter("a", 1))

    @rule(index=st.integers(0), size=st.integers(0, 9), token=st.integers(0, 2))
    def branch(self, index, size, token):
        """A slice of a context that goes on otherwise."""
        context = self.seen[index % len(self.seen)][:size].extend(token)
        self.ask([context])
        self.seen.append(context)

    @rule(chosen=picks, num_passes=st.integers(0, 2))
    def drop(self, chosen, num_passes):
        """Nobody waits any more."""
        self.scheduler.wanted.extend([False] + [True] * num_passes)
        self.fail([self.seen[i % len(self.seen)].extend(token) for i, token in chosen])
        self.scheduler.wanted.clear()

    @rule(chosen=picks, num_passes=st.integers(0, 2))
    def break_down(self, chosen, num_passes):
        self.scheduler.runner.failing = [IndexError("by the test")] + [None] * num_passes
        self.fail([self.seen[i % len(self.seen)].extend(token) for i, token in chosen])
        self.scheduler.runner.failing = []

    def fail(self, contexts):
        self.scheduler.runner.adapter = None
        with contextlib.suppress(IndexError, QueryDroppedError):
            self.scheduler.evaluate([RowQuery(context) for context in distinct(contexts)])

    @rule(chosen=picks, num_passes=st.integers(0, 1))
    def run_out_of_memory(self, chosen, num_passes):
        asked = distinct(self.seen[i % len(self.seen)].extend(token) for i, token in chosen)
        if len(asked) > 1:
            self.scheduler.runner.failing = [MemoryError()] + [None] * num_passes
            with contextlib.suppress(MemoryError):  # of one alone
                self.ask(asked, num_failing=1)
            self.scheduler.runner.failing = []

    @rule(index=st.integers(0))
    def pin(self, index):
        if self.is_pinned:
            return
        context = self.seen[index % len(self.seen)]
        self.ask([context])
        nodes = self.scheduler.tree.nodes
        node = self.scheduler.cache.match(context, None, len(context))
        if nodes.depth[node] and nodes.slot[node] > 0:
            self.scheduler.tree.pin(node)
            self.is_pinned = True

    @rule(index=st.integers(0), more=st.lists(st.integers(0, 2), max_size=9))
    def load(self, index, more):
        """Keys and values of a file."""
        context = self.seen[index % len(self.seen)] + more
        slots_before = dict(self.scheduler.runner.written)

        def put(slots, codes):
            for slot, size in zip(slots.tolist(), range(-len(slots), 0), strict=True):
                ids = tuple(context)[: len(context) + 1 + size]
                self.scheduler.runner.written[slot] = (None, ids)

        self.scheduler.cache.pool.put = put
        if not self.scheduler.cache.fill(context.packed(), [], [], len(context), None):
            assert self.scheduler.runner.written == slots_before
        self.seen.append(context)

    @rule(count=st.integers(1, 60))
    def evict(self, count):
        """As one that has no part in it makes room."""
        self.scheduler.tree.new_step()
        self.scheduler.tree.evict(count)

    @rule()
    def clear(self):
        self.scheduler.tree.clear()
        self.is_pinned = False
        assert self.scheduler.tree.slots.num_used == 0

    @invariant()
    def adds_up(self):
        check_integrity(self.scheduler.tree)
        nodes = self.scheduler.tree.nodes
        linked = nodes.table[nodes.table > 0]
        assert not (nodes.token[linked] == BAD).any()  # nothing is kept behind a NaN


class ManyHistories(Histories):
    """The same, for longer."""


Histories.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
ManyHistories.TestCase.settings = settings(deadline=None, max_examples=300, stateful_step_count=40)
TestHistories = Histories.TestCase
TestManyHistories = pytest.mark.slow(pytest.mark.timeout(600)(ManyHistories.TestCase))


def test_step_does_not_read_old_slots_of_recomputed_tokens():
    """They went to the host, and a text that was scored had them computed into other slots."""
    passes = passes_of(40, 60, few_tokens=10**6)
    context = of_no_model([0, 1, 2, 0, 1])
    ask(passes, [context])
    ask(passes, [context := context.extend(2)])
    ask(passes, [context := context.extend(0)])
    assert passes.runner.num_steps == 1
    passes.tree.new_step()
    assert passes.tree.evict(40) == len(context)
    ask(passes, [of_no_model([2, 2, 2, 2]), of_no_model([1, 1])])  # where they were
    passes.evaluate([ScoreQuery(RowQuery(context), 1)])
    passes.evaluate([RowQuery(context), ScoreQuery(RowQuery(of_no_model([1, 2, 1])), 1)])
    assert passes.tree.num_cached(context, None, "device") == len(context)
    ask(passes, [context.extend(1), context.extend(2)])


def started(num_contexts, **options):
    """Passes, and contexts all of which a step has been made behind."""
    passes = passes_of(1000, few_tokens=3, **options)
    contexts = [of_no_model([0, 1, 2, 0, 1, i % 3, i // 3]) for i in range(num_contexts)]
    ask(passes, contexts)
    contexts = [context.extend(i % 3) for i, context in enumerate(contexts)]
    ask(passes, contexts)
    return passes, contexts


def test_rows_that_are_nan_only_in_batches_are_recomputed_alone():
    class SpoiltBeside(Spoiling):
        def forward(self, batch, attend):
            is_whole = isinstance(attend, UncachedAttention)
            return (
                FakeRunner.forward(self, batch, attend)
                if is_whole
                else super().forward(batch, attend)
            )

    passes, contexts = started(4, runner=SpoiltBeside())
    longer = [contexts[i].extend(token) for i, token in [(0, BAD), (1, 1), (2, BAD)]]
    asked = [longer[1], longer[0], *longer, *longer[::-1]]
    rows = passes.evaluate([RowQuery(context) for context in asked])
    for row, context in zip(rows, asked, strict=True):
        expected = logprobs_after(tuple(context))
        torch.testing.assert_close(row.logprobs, expected, rtol=0, atol=1e-6)
    check_integrity(passes.tree)
    assert [passes.tree.num_cached(c) - len(c) for c in longer] == [-1, 0, -1]


def test_context_asked_twice_in_batch_is_cached_once():
    """Whoever evaluates asks no context twice; a batch that does is right all the same."""
    passes, contexts = started(3)
    used = passes.tree.slots.num_used
    longer = [contexts[i].extend(token) for i, token in [(0, 1), (0, 2), (1, 1), (0, 1), (1, 1)]]
    ask(passes, longer)
    assert passes.tree.slots.num_used == used + 3
    ask(passes, [context.extend(0) for context in longer])  # each of which knows its place
    assert passes.runner.num_steps == 2
    ask(passes, longer)  # what is cached of them is their last tokens too
    assert passes.tree.slots.num_used == used + 3 + 3


@pytest.mark.parametrize("num_contexts", [1, 6])
def test_no_slot_leaks_if_memory_for_nodes_runs_out(num_contexts, monkeypatch):
    passes, contexts = started(num_contexts)
    nodes, size, zeros = passes.tree.nodes, len(passes.tree.nodes.parent), np.zeros
    while nodes.num_made < size:  # the free ones are used first
        ask(
            passes, contexts := [context.extend(1) for context in contexts[: size - nodes.num_made]]
        )
    used = passes.tree.slots.num_used

    def no_memory(shape, *given):
        if isinstance(shape, int) and shape > size:
            raise MemoryError
        return zeros(shape, *given)

    longer = [context.extend(2) for context in contexts]
    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", no_memory)
        for asked in (longer, [*longer, of_no_model([2, 1, 2])]):
            with contextlib.suppress(MemoryError):  # of one alone
                rows = passes.evaluate([RowQuery(context) for context in asked])
                assert {type(row) for row in rows} == {MemoryError}
            check_integrity(passes.tree)
    assert passes.tree.slots.num_used == used
    ask(passes, longer)


def test_cache_hint_of_another_model_is_ignored():
    first, second = passes_of(100), passes_of(100)
    ask(second, [of_no_model([2, 2, 2, 2, 2, 2])])
    context = of_no_model([0, 1, 2])
    for token in [0, 1, 2, 0]:
        for passes in (first, second, second, first):
            ask(passes, [context])
        context = context.extend(token)
